"""Ratios of paired times: the median with an interval whose coverage is known."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import binom

from crosslayer.stats import LEVEL
from crosslayer.stats.estimate import Estimate

FEWEST = 5  # pairs that give an interval: that of four covers 87.5% only


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the median of candidate / baseline over pairs, whose interval covers `coverage(pairs)`.

    The ends are the k-th lowest and the k-th highest ratio. For any distribution, the median lies outside with the
    probability that as many fair coins as there are pairs show fewer than k heads, or fewer than k tails. With fewer
    than five pairs the estimate has no interval. From six pairs on the ends equal those of `scipy.stats.quantile_test`.
    """
    logs = np.sort(np.log(np.asarray(candidate, dtype=float) / np.asarray(baseline, dtype=float)))  # (pairs,)
    rank = _rank(len(logs))
    low, high = (logs[rank - 1], logs[-rank]) if len(logs) >= FEWEST else (None, None)
    facts = {"n": len(logs), "over": "pairs of runs", "how": "order statistics"}
    return Estimate(value=np.median(logs), low=low, high=high, **facts).mapped(lambda log: float(np.exp(log)))


def coverage(pairs: int) -> float:
    """Return how often an interval of `paired_ratio` holds the median: 0.9375 with 5 pairs, 0 without an interval."""
    return float(1 - 2 * binom.cdf(_rank(pairs) - 1, pairs, 0.5)) if pairs >= FEWEST else 0.0


def _rank(pairs: int) -> int:
    """Return the largest k whose interval covers `LEVEL`, 1 where none does."""
    return max(1, int(binom.ppf((1 - LEVEL) / 2, pairs, 0.5)))

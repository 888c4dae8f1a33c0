"""Ratios of paired times: the median with an interval whose coverage is known, and what may be said of it."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy.stats import binom

from crosslayer.stats import LEVEL

Verdict = Literal["faster", "slower", "no difference seen", "too few pairs"]

CLEAR = 0.9  # the coverage from which an interval decides: 5 pairs
FEWEST = 3  # pairs that give an interval


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Return the median of candidate / baseline over pairs and its interval, which covers `coverage(pairs)`.

    The ends are the k-th lowest and the k-th highest of the pairs: whatever the distribution, the median is outside of
    them as often as so many fair coins show fewer than k heads or tails. Fewer than three pairs give none. From six
    pairs on these are the ends of `scipy.stats.quantile_test`, which gives none for fewer.
    """
    logs = np.sort(np.log(np.asarray(candidate, dtype=float) / np.asarray(baseline, dtype=float)))  # (pairs,)
    ratio = float(np.exp(np.median(logs)))
    if len(logs) < FEWEST:
        return ratio, None
    rank = _rank(len(logs))
    return ratio, (float(np.exp(logs[rank - 1])), float(np.exp(logs[-rank])))


def coverage(pairs: int) -> float:
    """Return how often an interval of `paired_ratio` holds the median: 0.9375 with 5 pairs, 0 without an interval."""
    return float(1 - 2 * binom.cdf(_rank(pairs) - 1, pairs, 0.5)) if pairs >= FEWEST else 0.0


def verdict(interval: Sequence[float] | None, pairs: int) -> Verdict:
    """Return what an interval says: nothing where it is missing or covers less than `CLEAR`."""
    if interval is None or coverage(pairs) < CLEAR:
        return "too few pairs"
    if interval[0] <= 1 <= interval[1]:
        return "no difference seen"
    return "faster" if interval[1] < 1 else "slower"


def _rank(pairs: int) -> int:
    """Return the largest k whose interval covers `LEVEL`, 1 where none does."""
    return max(1, int(binom.ppf((1 - LEVEL) / 2, pairs, 0.5)))

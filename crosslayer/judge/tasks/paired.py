"""Differences between two models on the same items.

    D = Σ (x_i − y_i) / Σ w_i;   r_i = (x_i − y_i − D w_i) / mean(w);   D ± t(0.975, n − 1) · std(r) / √n

x and y are the items of the candidate and of the baseline; w is 1 except for perplexities over words or bytes. With
equal weights this is the paired t interval of a mean. It is used instead of a bootstrap because it is deterministic and
agrees with one for the hundreds of items that tasks have.

The differences of items that are right or wrong are in `crosslayer.stats.shares`.

Shapes: n items, T tasks. Source of the number of items: Connor (1987).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from crosslayer.stats import NORMAL
from crosslayer.stats.estimate import Estimate
from crosslayer.stats.means import FEWEST, t_quantile
from crosslayer.stats.shares import share_difference, share_error

POWER = 0.8
POINT = 0.01  # the difference for which items are counted: a point of a share, 1% of a perplexity


class Paired(NamedTuple):
    """A change over items: candidate − original, or candidate / original for perplexities, and counts that go with it.

    p is McNemar's for items that are right or wrong, Student's t otherwise, and normal for groups of tasks. The counts
    are those of items that only one of both gets right, and of items that 1 point, or 1% of a perplexity, needs with a
    power of 80%.
    """

    change: Estimate
    counts: dict[str, int] = {}


def compare_shares(candidate: np.ndarray, baseline: np.ndarray) -> Paired:
    """Return the paired difference of shares of items (n,) that are 0 or 1."""
    only = int(((candidate == 1) & (baseline == 0)).sum()), int(((candidate == 0) & (baseline == 1)).sum())
    return Paired(
        change=share_difference(*only, len(candidate), over="items"),
        counts={
            "only_candidate": only[0],
            "only_original": only[1],
            "items_for_a_point": items_for_shares(sum(only) / len(candidate)),
        },
    )


def compare_means(candidate: np.ndarray, baseline: np.ndarray, weights: np.ndarray) -> Paired:
    """Return the paired difference of weighted means of items (n,)."""
    return Paired(change=_weighted(candidate - baseline, weights)[0])


def compare_perplexities(candidate: np.ndarray, baseline: np.ndarray, weights: np.ndarray) -> Paired:
    """Return the ratio of perplexities exp(−Σ x / Σ w), from the log likelihoods of items (n,)."""
    change, spread = _weighted(baseline - candidate, weights)  # of the log perplexity
    counts = {}
    if spread:  # number of items with which 1% is detected in 80% of cases
        quantiles = NORMAL + stats.norm.ppf(POWER)
        counts["items_for_a_point"] = max(FEWEST, math.ceil((quantiles * spread / math.log1p(POINT)) ** 2))
    return Paired(change.mapped(math.exp), counts)


def _weighted(differences: np.ndarray, weights: np.ndarray) -> tuple[Estimate, float | None]:
    """Return Σ d / Σ w of n items, and the standard deviation of an item; no interval and None below `FEWEST`."""
    count, value = len(differences), float(differences.sum() / weights.sum())
    facts: dict[str, Any] = {"value": value, "n": count, "over": "items", "how": "Student's t"}
    if count < FEWEST:
        return Estimate(**facts), None
    spread = float(((differences - value * weights) / weights.mean()).std(ddof=1))
    error = spread / math.sqrt(count)
    half = error * t_quantile(count - 1)
    p = float(2 * stats.t.sf(abs(value) / error, count - 1) if error else not value)
    return Estimate(**facts, low=value - half, high=value + half, p=p), spread


def compare_groups(differences: Sequence[np.ndarray], weights: np.ndarray) -> Paired:
    """Return the difference of means over T tasks with weights (T,), from item differences (n,) of −1 to 1 per task.

    Tasks are independent, so their variances add up.
    """
    shares = weights / weights.sum()
    errors = np.array([share_error(int((d > 0).sum()), int((d < 0).sum()), len(d)) for d in differences])
    value = float(shares @ np.array([values.mean() for values in differences]))
    error = float(np.sqrt(((shares * errors) ** 2).sum()))
    change = Estimate(
        value=value,
        low=max(-1.0, value - NORMAL * error),
        high=min(1.0, value + NORMAL * error),
        n=sum(map(len, differences)),
        over="items",
        how="Agresti-Min",
        p=float(2 * stats.norm.sf(abs(value) / error)),
    )
    return Paired(change=change)


def items_for_shares(discordance: float) -> int:
    """Return with how many items a difference of 1 point is detected in 80% of cases, from the share that differs.

    If fewer than 1% differ, a difference of a point is impossible; the share is then taken as 1%.
    """
    share = max(discordance, POINT)
    high = stats.norm.ppf(POWER)
    return math.ceil(((NORMAL * math.sqrt(share) + high * math.sqrt(share - POINT**2)) / POINT) ** 2)

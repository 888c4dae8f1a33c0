"""Differences between paired runs: the conclusions they allow, and how many seeds a stronger one would take.

    d_s = candidate_s − baseline_s;   mean(d) ± t(0.975, S − 1) · std(d) / √S

Runs of one seed share initial weights and the order of the data, so their difference is free of what both share.

Shapes: S pairs, M comparisons. Source of the adjusted p-values: Holm (1979).
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from crosslayer.stats import LEVEL, NORMAL
from crosslayer.stats.estimate import Estimate

FEWEST = 3  # pairs that give an interval: of two, one degree of freedom makes it twelve times the standard error
MOST = 100_000  # seeds that are still counted


def paired_difference(candidate: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the mean difference of values (S,) that belong together pair by pair, with p for a difference of 0."""
    if len(candidate) != len(baseline) or not candidate:
        raise ValueError(
            f"pairs need as many candidates as baselines, at least one, got {len(candidate)} and {len(baseline)}"
        )
    values = np.asarray(candidate, dtype=float) - np.asarray(baseline, dtype=float)  # (S,)
    if not np.isfinite(values).all():
        raise ValueError("a loss is not finite; leave out runs that diverged, and say so")
    return t_mean(values).model_copy(update={"p": _p_value(values)})


def t_mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """Return the mean of values (S,) of seeds, with a 95% interval by Student's t from three on."""
    ends = t_ends(np.asarray(values, dtype=float))
    low, high = (None, None) if ends is None else map(float, ends)
    return Estimate(value=float(np.mean(values)), low=low, high=high, n=len(values), over="seeds", how="Student's t")


def t_ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the ends (…) of the 95% interval of the mean over S of values (S, …), as `t_mean` has it."""
    if len(values) < FEWEST:
        return None
    mean, half = values.mean(axis=0), stats.sem(values, axis=0) * t_quantile(len(values) - 1)
    return mean - half, mean + half


def _p_value(values: np.ndarray) -> float | None:
    """Return the two-sided p-value of Student's t for a mean of 0 of values (S,); None below three."""
    if len(values) < FEWEST:
        return None
    mean, error = abs(float(values.mean())), float(stats.sem(values))
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(mean / error, len(values) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values (M,) adjusted by Holm: below 0.05 they err in any of M comparisons at most once in 20 times."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, stable=True).tolist()):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def seeds_needed(values: Sequence[float], difference: float) -> int | None:
    """Return with how many pairs the 95% interval would be narrower than a difference on either side.

    The spread is taken from the values (S,) of the pairs at hand, so with few pairs the number is a rough one. None
    where fewer than two pairs tell no spread, or where more than `MOST` would be needed.
    """
    if len(values) < 2 or difference == 0:
        return None
    spread = float(np.std(values, ddof=1))
    count = max(FEWEST, math.ceil((NORMAL * spread / difference) ** 2))  # t is wider
    while count <= MOST:
        if t_quantile(count - 1) * spread / math.sqrt(count) < abs(difference):
            return count
        count += 1
    return None


def t_quantile(degrees: int) -> float:
    """Return by how many standard errors a 95% interval reaches to either side, by Student's t."""
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees))

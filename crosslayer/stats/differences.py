"""Differences of two models: of means over paired runs, and of shares of items that both answer.

    d_s = candidate_s − baseline_s;   mean(d) ± t(0.975, S − 1) · std(d) / √S

Runs of one seed share initial weights and the order of the data, so their difference is free of what both share.
Student's t over items that are right or wrong would give an interval of no width where no pair differs. So a share has
Wilson's interval (1927), a difference Agresti and Min's (2005), and it is only seen if McNemar's exact test (1947) sees
it too.

Shapes: S pairs, M comparisons. Source of the adjusted p-values: Holm (1979).
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special, stats

from crosslayer.stats import LEVEL, NORMAL, t_quantile
from crosslayer.stats.estimate import Estimate

# pairs that give an interval: of two, one degree of freedom makes it twelve times the standard error
FEWEST = 3
MOST = 100_000  # seeds that are still counted


def paired_difference(candidate: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the mean difference of values (S,) that belong together pair by pair, with p for a difference of 0."""
    if len(candidate) != len(baseline) or not candidate:
        raise ValueError(
            f"pairs need as many candidates as baselines, at least one, got {len(candidate)} and {len(baseline)}"
        )
    values = np.asarray(candidate, dtype=float) - np.asarray(baseline, dtype=float)  # (S,)
    if not np.isfinite(values).all():
        raise ValueError("losses must be finite; leave out runs that diverged, and report them")
    estimate = t_mean(values)
    if len(values) < FEWEST:
        return estimate

    mean = abs(float(values.mean()))
    error = float(standard_error(values))
    # where all differences are equal, t would be 0 / 0 or infinite
    p = 1.0 if mean == 0 else 0.0
    if error > 0:
        p = float(2 * special.stdtr(len(values) - 1, -mean / error))
    return estimate.model_copy(update={"p": p})


def t_mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """Return the mean of values (S,) of seeds, with a 95% interval by Student's t from three on."""
    ends = t_ends(np.asarray(values, dtype=float))
    low, high = (None, None) if ends is None else map(float, ends)
    return Estimate(value=float(np.mean(values)), low=low, high=high, n=len(values), over="seeds", how="Student's t")


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error (…) of the mean over S of values (S, …); scipy's own takes ten times as long."""
    return values.std(axis=0, ddof=1) / math.sqrt(len(values))


def t_ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the ends (…) of the 95% interval of the mean over S of values (S, …), as `t_mean` has it."""
    if len(values) < FEWEST:
        return None
    mean = values.mean(axis=0)
    half = standard_error(values) * t_quantile(len(values) - 1)
    return mean - half, mean + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values (M,) adjusted by Holm: below 0.05 they err in any of M comparisons at most once in 20 times."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(np.argsort(p_values, stable=True).tolist()):
        # never below a smaller p-value's: the order must stay
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
    # Student's t is wider than the normal law, so no smaller number will do
    count = max(FEWEST, math.ceil((NORMAL * spread / difference) ** 2))
    while count <= MOST:
        if t_quantile(count - 1) * spread / math.sqrt(count) < abs(difference):
            return count
        count += 1
    return None


def share(found: int, n: int) -> Estimate:
    """Return a share of n samples with Wilson's 95% interval."""
    interval = stats.binomtest(found, n).proportion_ci(LEVEL, method="wilson")
    return Estimate(value=found / n, low=interval.low, high=interval.high, n=n, over="samples", how="Wilson")


def share_difference(candidate: int, baseline: int, count: int, over: str = "samples") -> Estimate:
    """Return the difference of shares over items that both answer.

        (b − c) / (n + 2) ± z(0.975) · √(b + c + 1 − (b − c)² / (n + 2)) / (n + 2)

    Agresti and Min (2005), 10.1002/sim.1781: half an item is added to each cell of the table. Newcombe's interval for
    pairs (1998) is nearly of no width where all answers agree: ± 0.2 points for 200 items, 120 of them right. p is that
    of McNemar's exact test.

    b items only the candidate has right, c only the baseline; n are all.
    """
    if not count:
        raise ValueError("pairs need at least one sample that both sides answered, got none")
    half = NORMAL * share_error(candidate, baseline, count)
    middle = (candidate - baseline) / (count + 2)
    either = candidate + baseline
    return Estimate(
        value=(candidate - baseline) / count,
        low=max(-1.0, middle - half),
        high=min(1.0, middle + half),
        n=count,
        over=over,
        how="Agresti-Min",
        p=float(stats.binomtest(candidate, either).pvalue) if either else 1.0,
    )


def share_error(candidate: int, baseline: int, count: int) -> float:
    """Return the standard error of a difference of shares, from the items that only one of both has right.

    As `share_difference` has it, so that it is never 0.
    """
    total = count + 2
    return math.sqrt(candidate + baseline + 1 - (candidate - baseline) ** 2 / total) / total


def in_points(change: Estimate) -> Estimate:
    """Return a difference of shares in percentage points."""
    return change.mapped(lambda share: 100 * share)

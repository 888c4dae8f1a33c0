"""Shares of items that are right or wrong, and differences of them between two models that answer the same items.

Student's t over pairs would give an interval of no width where no pair differs. So a share has Wilson's interval
(1927), a difference Agresti and Min's (2005), and it is only seen if McNemar's exact test (1947) sees it too.
"""

import math

from scipy import stats

from crosslayer.stats import LEVEL, NORMAL
from crosslayer.stats.estimate import Estimate


def share(found: int, n: int, over: str = "samples") -> Estimate:
    """Return a share of n with Wilson's 95% interval."""
    interval = stats.binomtest(found, n).proportion_ci(LEVEL, method="wilson")
    return Estimate(value=found / n, low=interval.low, high=interval.high, n=n, over=over, how="Wilson")


def share_difference(candidate: int, baseline: int, count: int, over: str = "samples") -> Estimate:
    """Return the difference of shares over items that both answer.

        (b − c) / (n + 2) ± z(0.975) · √(b + c + 1 − (b − c)² / (n + 2)) / (n + 2)

    Agresti and Min (2005), 10.1002/sim.1781: half an item is added to each cell of the table. Newcombe's interval for
    pairs (1998) is nearly of no width where all answers agree: ± 0.2 points for 200 items, 120 of them right. p is that
    of McNemar's exact test.

    b items only the candidate has right, c only the baseline; n are all.
    """
    if not count:
        raise ValueError("pairs need at least one sample that both sides were asked; got none")
    half, middle = NORMAL * share_error(candidate, baseline, count), (candidate - baseline) / (count + 2)
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

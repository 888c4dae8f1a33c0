"""Shares of items that are right or wrong, and differences of them between two models that answer the same items.

Student's t over pairs would give an interval of no width where no pair differs. So a share has Wilson's interval
(1927), a difference Agresti and Min's (2005), and it is only seen if McNemar's exact test (1947) sees it too.
"""

import math
from typing import Literal

from scipy import stats

from crosslayer.stats import LEVEL, NORMAL, Interval

Verdict = Literal["better", "worse", "no difference seen"]


def wilson(found: int, n: int) -> Interval:
    """Return Wilson's 95 % interval of a share of n."""
    interval = stats.binomtest(found, n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def share_difference(candidate: int, baseline: int, count: int) -> Interval:
    """Return the 95 % interval of a difference of shares over items that both answer.

        (b − c) / (n + 2) ± z(0.975) · √(b + c + 1 − (b − c)² / (n + 2)) / (n + 2)

    Agresti and Min (2005), 10.1002/sim.1781: half an item is added to each cell of the table. Newcombe's interval for
    pairs (1998) is nearly of no width where all answers agree: ± 0.2 points for 200 items, 120 of them right.

    b items only the candidate has right, c only the baseline; n are all.
    """
    if not count:
        raise ValueError("pairs need at least one sample that both sides were asked; got none")
    half, middle = NORMAL * share_error(candidate, baseline, count), (candidate - baseline) / (count + 2)
    return max(-1.0, middle - half), min(1.0, middle + half)


def mcnemar(candidate: int, baseline: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, from the items that only one of both has right."""
    count = candidate + baseline
    return 1.0 if not count else float(stats.binomtest(candidate, count).pvalue)


def verdict_of(interval: Interval | None, higher_is_better: bool = True, p: float = 0.0) -> Verdict:
    """Return what the interval of a difference says, of shares beside the `p` of McNemar's test; None: nothing."""
    if interval is None or interval[0] <= 0 <= interval[1] or p >= 1 - LEVEL:
        return "no difference seen"
    return "better" if (interval[0] > 0) == higher_is_better else "worse"


def share_error(candidate: int, baseline: int, count: int) -> float:
    """Return the standard error of a difference of shares, from the items that only one of both has right.

    As `share_difference` has it, so that it is never 0.
    """
    total = count + 2
    return math.sqrt(candidate + baseline + 1 - (candidate - baseline) ** 2 / total) / total

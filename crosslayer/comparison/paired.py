"""Differences between paired runs: what may be said of them, and how many seeds it would take to say more.

Runs of one seed share initial weights and the order of the data, so their difference is free of what both share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

LEVEL = 0.95
FEWEST = 3  # pairs that give an interval: of two, one degree of freedom makes it twelve times the standard error
MOST = 100_000  # seeds that are still counted

Verdict = Literal["lower", "higher", "undecided"]


@dataclass(frozen=True)
class Difference:
    """The mean of candidate − baseline over S pairs, with its 95 % interval by Student's t; None below three pairs."""

    values: tuple[float, ...]  # (S,)
    mean: float
    interval: tuple[float, float] | None

    @property
    def verdict(self) -> Verdict:
        """Whether the candidate's value is lower or higher; undecided where the interval holds 0 or is missing."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "undecided"
        return "lower" if self.interval[1] < 0 else "higher"

    @property
    def visible(self) -> float | None:
        """The least mean that these pairs would have shown: half of the interval's width."""
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2


def paired_difference(candidate: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Return the difference of values (S,) that belong together pair by pair.

    Raises:
        ValueError: the sides are of different lengths or empty, or a value is not finite.

    """
    if len(candidate) != len(baseline) or not candidate:
        raise ValueError(
            f"pairs need as many candidates as baselines, at least one; got {len(candidate)} and {len(baseline)}"
        )
    values = np.asarray(candidate, dtype=float) - np.asarray(baseline, dtype=float)  # (S,)
    if not np.isfinite(values).all():
        raise ValueError("a loss is not finite; leave out runs that diverged, and say so")
    mean = float(values.mean())
    if len(values) < FEWEST:
        return Difference(tuple(values.tolist()), mean, None)
    half = _quantile(len(values)) * float(stats.sem(values))
    return Difference(tuple(values.tolist()), mean, (mean - half, mean + half))


def seeds_needed(values: Sequence[float], difference: float) -> int | None:
    """Return with how many pairs the 95 % interval would be narrower than a difference on either side.

    The spread is taken from the values (S,) of the pairs at hand, so with few pairs the number is a rough one. None
    where fewer than two pairs tell no spread, or where more than `MOST` would be needed.
    """
    if len(values) < 2 or difference == 0:
        return None
    spread = float(np.std(values, ddof=1))
    count = max(FEWEST, math.ceil((stats.norm.ppf((1 + LEVEL) / 2) * spread / difference) ** 2))  # t is wider
    while count <= MOST:
        if _quantile(count) * spread / math.sqrt(count) < abs(difference):
            return count
        count += 1
    return None


def _quantile(pairs: int) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, pairs - 1))

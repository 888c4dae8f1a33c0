"""A value with its interval: the one form in which every comparison is recorded, judged and written."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.formatting import UNKNOWN
from crosslayer.output.record import Frozen
from crosslayer.stats import LEVEL, t_quantile

Verdict = Literal["lower", "higher", "no difference seen"]
Better = Literal["lower", "higher"]
NOT_TESTED = "not tested"  # how pages write that there is too little for a verdict
ERROR = 1 - LEVEL  # of a p-value, above which no difference is seen
# of a ratio: a count of bytes that differs by less is the same for every purpose
RELEVANT = 1e-4
FEWEST_DOMAINS = 3  # that a prediction interval needs


class Estimate(Frozen):
    """A value with its 95% interval.

    `low` and `high` are None where there is too little to give an interval. `none` is the value that means no
    difference: 0 for a difference, 1 for a ratio.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int = Field(ge=1, description="units that the interval is over")
    over: str = Field(description="what these units are: windows, domains, seeds, items, samples, pairs of runs …")
    how: str = Field(description="bootstrap, Student's t, Wilson, Agresti-Min, order statistics or prediction")
    p: float | None = Field(default=None, ge=0, le=1, description="two-sided, where a test goes with it")
    none: float = 0.0

    @model_validator(mode="after")
    def _check_ratio(self) -> Self:
        if self.none == 1 and min((self.value, *(self.interval or ()))) <= 0:
            raise ValueError(f"a ratio must be above 0, got {self.value}")
        return self

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the interval; None without one."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the value is lower or higher than no difference; None without an interval: nothing was tested.

        The interval, and p if there is one, must say so, and a ratio must be more than `RELEVANT` from 1.
        """
        if self.interval is None:
            return None
        # a ratio of bytes is exact: its interval excludes 1 however close it is
        low, high = self.interval
        is_small = self.none == 1 and abs(self.value - 1) <= RELEVANT
        if low <= self.none <= high or is_small or (self.p is not None and self.p >= ERROR):
            return "no difference seen"
        return "lower" if high < self.none else "higher"

    @property
    def p_decides(self) -> bool:
        """Whether no difference is seen because of p alone: the interval excludes it."""
        if self.interval is None or self.p is None or self.p < ERROR:
            return False
        return not self.interval[0] <= self.none <= self.interval[1]

    def is_better(self, better: Better) -> bool | None:
        """Return whether the difference is for the better; None if no difference is seen, or nothing was tested."""
        return None if self.verdict in (None, "no difference seen") else self.verdict == better

    def mapped(self, function: Callable[[float], float]) -> Self:
        """Return the estimate of a monotone function of the value: in points, or of the inverse ratio."""
        # a function that falls, such as the inverse, exchanges the ends
        low, high = sorted(map(function, self.interval)) if self.interval is not None else (None, None)
        facts = {"value": function(self.value), "low": low, "high": high, "none": function(self.none)}
        return self.model_copy(update=facts)

    def text(self, digits: int = 3, signed: bool = False, percent: bool = False, unit: str = "") -> str:
        """Return the value with its interval: 0.343 (0.324-0.363), signed −0.031 (−0.040 to −0.022), with a unit 2x."""
        # z: a value that rounds to 0 has no minus
        form = f"{'+' if signed else ''}z.{digits}{'%' if percent else 'f'}"
        value, *ends = (format(end, form).replace("-", "−") for end in (self.value, *(self.interval or ())))
        # a dash between negative numbers would read as a minus
        joint = " to " if signed or "−" in "".join(ends) else "-"
        return f"{value}{unit} ({joint.join(ends) or UNKNOWN})"


def band(estimates: Sequence[Estimate]) -> tuple[list[float], list[float | None], list[float | None]]:
    """Return the values, the lower and the upper ends of estimates, as a figure's line takes them."""
    lows = [estimate.low for estimate in estimates]
    highs = [estimate.high for estimate in estimates]
    return [estimate.value for estimate in estimates], lows, highs


def new_domain(means: Sequence[float] | np.ndarray, least: float = -math.inf) -> Estimate:
    """Return the mean over domains, with the 95% prediction interval of the mean of one more domain.

        x̄ ± t(0.975, D − 1) · s · √(1 + 1/D)

    An interval over windows says what more text of the same domains would give. This one says what text of another kind
    would, if it is drawn as these domains were. `means` (D,) are those of the domains; the interval ends at `least`,
    which is 0 for a KL.
    """
    count = len(means)
    value = float(np.mean(means))
    facts = {"value": value, "n": count, "over": "domains", "how": "prediction"}
    if count < FEWEST_DOMAINS:
        return Estimate(**facts)
    half = t_quantile(count - 1) * float(np.std(means, ddof=1)) * math.sqrt(1 + 1 / count)
    return Estimate(**facts, low=max(least, value - half), high=value + half)

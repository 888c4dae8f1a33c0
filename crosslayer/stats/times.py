"""Times of two models that run alternately: medians with quartiles, and the ratio over pairs with its interval."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from crosslayer.output.formatting import readable_seconds
from crosslayer.output.record import Frozen
from crosslayer.stats.estimate import Estimate, Verdict
from crosslayer.stats.ratios import paired_ratio

SPEED: dict[Verdict, str] = {"lower": "faster", "higher": "slower"}  # how a lower or higher time reads


class Timing(Frozen):
    """Seconds that a model takes, over repeats."""

    median: PositiveFloat
    quartiles: tuple[PositiveFloat, PositiveFloat]

    @property
    def spread(self) -> float:
        """How far apart the quartiles are, as a fraction: 0.2 means 20%."""
        return self.quartiles[1] / self.quartiles[0] - 1


class TimeComparison(Frozen):
    """A time of both models."""

    candidate: Timing
    baseline: Timing
    change: Estimate = Field(description="the median ratio candidate / baseline over pairs of runs")

    def durations(self) -> str:
        """Return the medians of candidate and baseline: 1.18 s / 1.32 s."""
        return " / ".join(readable_seconds(timing.median) for timing in (self.candidate, self.baseline))


class StepTime(Frozen):
    """The time of a decoding step of both models after `context` tokens."""

    context: PositiveInt
    batch: PositiveInt
    time: TimeComparison


def compare_times(candidate: Sequence[float], baseline: Sequence[float]) -> TimeComparison:
    """Return medians, quartiles and ratio of times (pairs,) in seconds."""
    timings = []
    for times in (candidate, baseline):
        low, median, high = (float(value) for value in np.quantile(times, [0.25, 0.5, 0.75]))
        timings.append(Timing(median=median, quartiles=(low, high)))
    return TimeComparison(candidate=timings[0], baseline=timings[1], change=paired_ratio(candidate, baseline))

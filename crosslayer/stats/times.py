"""Times of two models that run in turns: medians with quartiles, and the ratio over pairs with its interval."""

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

    def text(self) -> str:
        """Return the median with its quartiles: 1.18 s (1.15 s - 1.2 s)."""
        return f"{readable_seconds(self.median)} ({' - '.join(map(readable_seconds, self.quartiles))})"


class TimeComparison(Frozen):
    """A time of both models."""

    candidate: Timing
    baseline: Timing
    change: Estimate = Field(description="the median ratio candidate / baseline over pairs of runs")

    def both(self) -> tuple[Timing, Timing]:
        """Return the candidate's times and the baseline's."""
        return self.candidate, self.baseline

    @property
    def speed(self) -> str:
        """The verdict on a time: faster, slower or no difference seen."""
        return SPEED.get(self.change.verdict, self.change.verdict)

    def text(self) -> str:
        """Return the ratio with its interval and verdict: 0.850x (0.812-0.893) faster."""
        return f"{self.change.text(unit='x')} {self.speed}"

    def durations(self) -> str:
        """Return the medians of candidate and baseline: 1.18 s / 1.32 s."""
        return " / ".join(readable_seconds(timing.median) for timing in self.both())


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

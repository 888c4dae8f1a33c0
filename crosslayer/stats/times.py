"""Times of two models that run alternately: medians with quartiles, and the ratio over pairs with its interval."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt
from scipy.stats import binom

from crosslayer.output.formatting import readable_seconds
from crosslayer.output.record import Frozen
from crosslayer.stats import LEVEL
from crosslayer.stats.estimate import Estimate, Verdict

# pairs that give an interval: that of four covers 87.5% only
FEWEST = 5
SPEED: dict[Verdict, str] = {"lower": "faster", "higher": "slower"}  # how a lower or higher time reads


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the median of candidate / baseline over pairs, whose interval covers `coverage(pairs)`.

    The ends are the k-th lowest and the k-th highest ratio. For any distribution, the median lies outside with the
    probability that as many fair coins as there are pairs show fewer than k heads, or fewer than k tails. With fewer
    than five pairs the estimate has no interval. From six pairs on the ends equal those of `scipy.stats.quantile_test`.
    """
    # logarithms: the median of the inverse ratios is then the inverse of the median, also of an even number of pairs
    logs = np.sort(np.log(np.asarray(candidate, dtype=float) / np.asarray(baseline, dtype=float)))  # (pairs,)
    rank = _rank(len(logs))
    low, high = (logs[rank - 1], logs[-rank]) if len(logs) >= FEWEST else (None, None)
    facts = {"n": len(logs), "over": "pairs of runs", "how": "order statistics"}
    return Estimate(value=np.median(logs), low=low, high=high, **facts).mapped(lambda log: float(np.exp(log)))


def coverage(pairs: int) -> float:
    """Return how often an interval of `paired_ratio` holds the median: 0.9375 with 5 pairs, 0 without an interval."""
    return float(1 - 2 * binom.cdf(_rank(pairs) - 1, pairs, 0.5)) if pairs >= FEWEST else 0.0


def _rank(pairs: int) -> int:
    """Return the largest k whose interval covers `LEVEL`, 1 where none does."""
    return max(1, int(binom.ppf((1 - LEVEL) / 2, pairs, 0.5)))


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

"""What `record.json` of a bench holds: times in seconds, sizes in bytes, a row for each context and batch size."""

from typing import Generic, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from crosslayer.output.record import Frozen
from crosslayer.stats.ratios import Verdict
from crosslayer.verbs.bench.prediction import Operators, Prediction, Rates

Side = Literal["candidate", "baseline"]
SIDES: tuple[Side, Side] = ("candidate", "baseline")
MEASURES = ("ttft", "tpot_dynamic", "tpot_static")
Part = TypeVar("Part")


class Both(Frozen, Generic[Part]):
    """The same of both sides."""

    candidate: Part
    baseline: Part

    def sides(self) -> tuple[Part, Part]:
        """Return the candidate's and the baseline's."""
        return self.candidate, self.baseline

    def named_sides(self) -> tuple[tuple[Side, Part], tuple[Side, Part]]:
        """Return both with their names."""
        return ("candidate", self.candidate), ("baseline", self.baseline)


class ByCache(Frozen, Generic[Part]):
    """The same of both kinds of cache."""

    dynamic: Part
    static: Part

    def kinds(self) -> tuple[tuple[str, Part], tuple[str, Part]]:
        """Return both with their names."""
        return ("dynamic", self.dynamic), ("static", self.static)


class ModelFacts(Frozen):
    """What a model is; `bytes` are of its parameters."""

    name: str = Field(description="name without folders above it, or the class")
    class_: str = Field(validation_alias="class", serialization_alias="class")
    layers: int
    parameters: int
    bytes: int
    dtype: str
    device: str


class Timing(Frozen):
    """Seconds of a side: over repeats, and as predicted."""

    median: PositiveFloat
    quartiles: tuple[PositiveFloat, PositiveFloat]
    predicted: Prediction | None = None

    @property
    def spread(self) -> float:
        """How far apart the quartiles are: 0.2 is by 20 %."""
        return self.quartiles[1] / self.quartiles[0] - 1


class Note(Frozen):
    """A prediction that is far off: by how much (0.3: the measured time is 30 % more), and why."""

    off: float
    words: str


class Comparison(Both[Timing]):
    """A time of both sides: the median over pairs of candidate / baseline, with an interval whose ends are pairs."""

    ratio: PositiveFloat
    interval: tuple[PositiveFloat, PositiveFloat] | None = Field(description="None with fewer than three pairs")
    verdict: Verdict
    predicted_ratio: float | None = None
    notes: tuple[Note, ...] = ()


class CacheBytes(Both[int]):
    """Bytes that a cache allocates; `predicted_ratio` is the plan's."""

    ratio: float
    predicted_ratio: float | None


class ReadBytes(Both[int]):
    """Bytes of keys and values that the last decoding step reads: storing less is not reading less."""

    ratio: float


class PeakMemory(Both[int | None]):
    """Bytes above what was in use before; `reason` says why they are unknown."""

    reason: str | None

    @property
    def ratio(self) -> float | None:
        """Candidate / baseline, None where it is unknown."""
        if self.candidate is None or not self.baseline or self.reason is not None:
            return None
        return self.candidate / self.baseline


class UnsteadyRate(Frozen):
    """The rate that varied most over repeats, and how far apart its quartiles are (0.2: by 20 %)."""

    rate: str
    spread: float


class Row(Frozen):
    """What was measured with a context (tokens of the prompt) and a batch size."""

    context: PositiveInt
    batch: PositiveInt
    cache: ByCache[CacheBytes]
    reads: ReadBytes | None = Field(description="None where nothing is predicted")
    ttft: Comparison = Field(description="time to first token")
    tpot_dynamic: Comparison = Field(description="time per further token with a dynamic cache")
    tpot_static: Comparison = Field(description="time per further token with a static cache")
    tokens_per_second: ByCache[Both[float]]
    peak_memory: PeakMemory
    rates: Rates | None = Field(description="the machine's own; None where nothing is predicted")
    unsteadiest_rate: UnsteadyRate | None
    operators: Both[Operators]
    eager: Comparison | None = Field(description="time to first token, both with eager attention")
    no_eager: str | None = Field(description="why that was not measured")

    def times(self) -> dict[str, Comparison]:
        """Return the times by measure, in the order of `MEASURES`."""
        return {"ttft": self.ttft, "tpot_dynamic": self.tpot_dynamic, "tpot_static": self.tpot_static}


class Skip(Frozen):
    """A setting that did not fit into memory."""

    context: int
    batch: int
    reason: str

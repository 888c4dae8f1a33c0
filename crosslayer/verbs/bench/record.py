"""What `record.json` of a bench holds: times in seconds, sizes in bytes, a row for each context and batch size."""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from crosslayer.eviction.eviction import Evict
from crosslayer.output.record import SEVERAL, Frozen, ModelFacts, Options, Seed
from crosslayer.stats.ratios import Verdict
from crosslayer.verbs.bench.costs import Operators, Prediction, Rates

Side = Literal["candidate", "baseline"]
SIDES: tuple[Side, Side] = ("candidate", "baseline")
MEASURES = ("ttft", "tpot_dynamic", "tpot_static")
Part = TypeVar("Part")


class BenchSettings(Options):
    """What is measured: every context (tokens of the prompt) with every batch size."""

    contexts: Annotated[tuple[PositiveInt, ...], SEVERAL]
    batches: Annotated[tuple[PositiveInt, ...], SEVERAL] = (1,)
    new_tokens: PositiveInt
    repeats: PositiveInt
    attention: Literal["sdpa", "eager"] = "sdpa"
    seed: Seed = 0
    evict: Evict | None = Field(default=None, description="what the candidate's cache evicts")


class Both(Frozen, Generic[Part]):
    """The same of both sides."""

    candidate: Part
    baseline: Part

    def sides(self) -> tuple[Part, Part]:
        """Return the candidate's and the baseline's."""
        return self.candidate, self.baseline


class MeasuredModel(ModelFacts):
    """A model that runs in transformers."""

    bytes: int = Field(description="of its parameters")


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


class Bytes(Both[int]):
    """Bytes of both sides; `predicted_ratio` is the plan's."""

    ratio: float
    predicted_ratio: float | None = None


class CacheBytes(Frozen):
    """Bytes that each kind of cache allocates."""

    dynamic: Bytes
    static: Bytes


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
    cache: CacheBytes
    reads: Bytes | None = Field(description="keys and values that the last step reads; None where nothing is predicted")
    ttft: Comparison = Field(description="time to first token")
    tpot_dynamic: Comparison = Field(description="time per further token with a dynamic cache")
    tpot_static: Comparison = Field(description="time per further token with a static cache")
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


class ServedModel(Frozen):
    """A model as vLLM holds it; `kv_tokens` fit into the memory for the cache."""

    name: str
    class_: str = Field(alias="class")
    layers: int
    kv_blocks: PositiveInt
    kv_tokens: PositiveInt
    not_saved: str | None = Field(description="what its plan saves, and vLLM does not, in words")


class ServingSettings(Options):
    """What is measured in vLLM: every context with every number of requests at once."""

    contexts: Annotated[tuple[PositiveInt, ...], SEVERAL]
    requests: Annotated[tuple[PositiveInt, ...], SEVERAL]
    new_tokens: PositiveInt
    repeats: PositiveInt
    kv_bytes: PositiveInt = Field(description="memory for the cache of each side")
    dtype: str | None = Field(description="None: as vLLM has it")
    seed: Seed


class ServingRow(Frozen):
    """Requests of `context` random tokens, all sent at once; `time` until the last new token of the last."""

    context: PositiveInt
    requests: PositiveInt
    time: Comparison
    tokens_per_second: Both[PositiveFloat] = Field(description="new tokens of all requests")

    def throughput(self) -> tuple[float, tuple[float, float] | None]:
        """Return the throughput, candidate / baseline, and its interval: the ratio of the times turned over."""
        ends = self.time.interval
        return 1 / self.time.ratio, None if ends is None else (1 / ends[1], 1 / ends[0])

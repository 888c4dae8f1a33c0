"""The contents of a benchmark's `record.json`: times in seconds, sizes in bytes, a row per context and batch size."""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from crosslayer.eviction.eviction import Evict
from crosslayer.output.record import SEVERAL, Frozen, ModelFacts, Options, Seed
from crosslayer.stats.estimate import Estimate
from crosslayer.stats.times import TimeComparison
from crosslayer.wiring.kv_bits import KvBitsText

Role = Literal["candidate", "baseline"]
AttentionKind = Literal["sdpa", "eager"]
ROLES: tuple[Role, Role] = ("candidate", "baseline")
MEASURES = ("ttft", "tpot_dynamic", "tpot_static")
Value = TypeVar("Value")


class BenchSettings(Options):
    """The options of a benchmark: every context (tokens of the prompt) with every batch size and attention."""

    contexts: Annotated[tuple[PositiveInt, ...], SEVERAL]
    batches: Annotated[tuple[PositiveInt, ...], SEVERAL] = (1,)
    new_tokens: PositiveInt
    repeats: PositiveInt
    attention: Annotated[tuple[AttentionKind, ...], SEVERAL] = ("sdpa",)
    seed: Seed = 0
    evict: Evict | None = Field(default=None, description="eviction policy of the candidate's cache")
    kv_bits: KvBitsText | None = Field(default=None, description="bits of the candidate's cache")


class Both(Frozen, Generic[Value]):
    """A value for the candidate and one for the baseline."""

    candidate: Value
    baseline: Value

    def both(self) -> tuple[Value, Value]:
        """Return the candidate's value and the baseline's."""
        return self.candidate, self.baseline


class MeasuredModel(ModelFacts):
    """A model that runs in transformers."""

    bytes: int = Field(description="size of its parameters")


class Bytes(Both[int]):
    """Bytes of both models."""

    ratio: float
    share: float = Field(description="the ratio in 16 bits: of the baseline's 16-bit cache")


class CacheBytes(Frozen):
    """Bytes that a dynamic and a static cache allocate."""

    dynamic: Bytes
    static: Bytes


class QuantisedBytes(Both[int]):
    """Bytes of the caches of 16-bit models if they were quantised, by their plans, which say what is allocated."""

    kind: str = Field(description="int8, int4 or fp8")
    ratio: float = Field(description="candidate over the baseline's 16-bit cache")
    baseline_ratio: float = Field(description="baseline over the same")


class PeakMemory(Both[int | None]):
    """Peak bytes above what was in use before; `reason` says why they are unknown."""

    reason: str | None

    @property
    def ratio(self) -> float | None:
        """Candidate / baseline; None if unknown."""
        if self.candidate is None or not self.baseline or self.reason is not None:
            return None
        return self.candidate / self.baseline


class Row(Frozen):
    """The measurements at one context (prompt length in tokens), batch size and attention implementation."""

    context: PositiveInt
    batch: PositiveInt
    attention: AttentionKind
    cache: CacheBytes
    quantised: tuple[QuantisedBytes, ...] = Field(default=(), description="empty if one of the models allows none")
    reads: Bytes | None = Field(
        default=None, description="read by the last step, by the plans; None for a smaller cache, or without a plan"
    )
    ttft: TimeComparison = Field(description="time to first token")
    tpot_dynamic: TimeComparison = Field(description="time per further token with a dynamic cache")
    tpot_static: TimeComparison = Field(description="time per further token with a static cache")
    peak_memory: PeakMemory
    softmax_share: Both[float] | None = Field(default=None, description="of the time to first token, if eager")

    def times(self) -> dict[str, TimeComparison]:
        """Return the times by measure, in the order of `MEASURES`."""
        return {"ttft": self.ttft, "tpot_dynamic": self.tpot_dynamic, "tpot_static": self.tpot_static}


class Skip(Frozen):
    """A context, batch size and attention that did not fit into memory."""

    context: int
    batch: int
    attention: AttentionKind
    reason: str


class ServedModel(Frozen):
    """A model in vLLM; `kv_tokens` is how many tokens fit into the memory of its KV cache."""

    name: str
    class_: str = Field(alias="class")
    layers: int
    kv_blocks: PositiveInt
    kv_tokens: PositiveInt
    not_saved: str | None = Field(description="a sentence on cache memory that its plan saves and vLLM does not")


class ServingSettings(Options):
    """The options of a benchmark in vLLM: every context is measured with every number of concurrent requests."""

    contexts: Annotated[tuple[PositiveInt, ...], SEVERAL]
    requests: Annotated[tuple[PositiveInt, ...], SEVERAL]
    new_tokens: PositiveInt
    repeats: PositiveInt
    kv_bytes: PositiveInt = Field(description="memory for the KV cache of each model")
    dtype: str | None = Field(description="None: vLLM's default")
    seed: Seed


class ServingRow(Frozen):
    """Requests of `context` random tokens, all sent at once; `time` runs until the last request is complete."""

    context: PositiveInt
    requests: PositiveInt
    time: TimeComparison
    tokens_per_second: Both[PositiveFloat] = Field(description="new tokens of all requests")

    @property
    def throughput(self) -> Estimate:
        """The throughput ratio candidate / baseline: the inverse of the ratio of times."""
        return self.time.change.mapped(lambda ratio: 1 / ratio)

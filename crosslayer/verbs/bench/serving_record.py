"""What `record.json` of a bench in vLLM holds: times in seconds, memory in bytes."""

from pydantic import Field, PositiveFloat, PositiveInt

from crosslayer.output.record import Frozen, Seed
from crosslayer.verbs.bench.record import Both, Comparison


class ServedModel(Frozen):
    """A model as vLLM holds it; `kv_tokens` fit into the memory for the cache."""

    name: str
    class_: str = Field(validation_alias="class", serialization_alias="class")
    layers: int
    kv_blocks: PositiveInt
    kv_tokens: PositiveInt
    not_saved: str | None = Field(description="what its plan saves, and vLLM does not, in words")


class ServingSettings(Frozen):
    """What is measured: every context with every number of requests at once."""

    contexts: tuple[PositiveInt, ...] = Field(min_length=1)
    requests: tuple[PositiveInt, ...] = Field(min_length=1)
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

"""What `record.json` of a bench in vLLM holds: times in seconds, memory in bytes."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from crosslayer.output.record import Environment, Frozen, Seed, typed_command
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


class ServingRecord(Frozen):
    """What `record.json` of a bench in vLLM holds."""

    schema_: Literal["crosslayer/serving/1"] = Field(default="crosslayer/serving/1", alias="schema")
    models: Both[ServedModel]
    settings: ServingSettings
    command: str | None = typed_command()
    engine: str = Field(description="vLLM and its version")
    rows: tuple[ServingRow, ...] = Field(min_length=1)
    interval_coverage: float = Field(ge=0, le=1, description="how often an interval of so many pairs holds the median")
    seconds: float
    environment: Environment

    @property
    def kv_tokens_ratio(self) -> float:
        """Tokens that the cache holds, candidate / baseline."""
        return self.models.candidate.kv_tokens / self.models.baseline.kv_tokens

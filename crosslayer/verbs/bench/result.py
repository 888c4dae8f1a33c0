"""The result of a benchmark."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from crosslayer.cache.eviction import Evict
from crosslayer.judge.report import Report
from crosslayer.output.formatting import Table
from crosslayer.output.record import SEVERAL, Options, Seed
from crosslayer.wiring.kv_bits import KvBitsText


class BenchSettings(Options):
    """The options of a benchmark: every context (tokens of the prompt) with every batch size and attention."""

    contexts: Annotated[tuple[PositiveInt, ...], SEVERAL]
    batches: Annotated[tuple[PositiveInt, ...], SEVERAL] = (1,)
    new_tokens: PositiveInt
    repeats: PositiveInt
    attention: Annotated[tuple[Literal["sdpa", "eager"], ...], SEVERAL] = ("sdpa",)
    seed: Seed = 0
    evict: Evict | None = Field(default=None, description="eviction policy of the candidate's cache")
    kv_bits: KvBitsText | None = Field(default=None, description="bits of the candidate's cache")


class Benchmark(Report):
    """What `crosslayer.bench` returns: bytes, times and peak memory at each configuration, and a page.

    The scope of a row is its configuration: context 512, batch 1, sdpa.
    """

    schema_: Literal["crosslayer/bench/8"] = Field(default="crosslayer/bench/8", alias="schema")
    settings: BenchSettings
    skipped: tuple[str, ...] = Field(description="why configurations were left out")

    def tables(self) -> list[Table]:
        """Return the short table: a row for each configuration."""
        return [self.sibling("page").overview(self)]

"""The result of a benchmark in vLLM, and its page."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from crosslayer.judge.page import by_verdict, listing
from crosslayer.judge.report import Report
from crosslayer.output.formatting import listed, readable_bytes
from crosslayer.output.page import Page, Table
from crosslayer.output.record import SEVERAL, Options, Seed
from crosslayer.stats.times import FEWEST
from crosslayer.verbs.bench.page import TOO_FEW, covered


class ServingSettings(Options):
    """The options of a benchmark in vLLM: every context is measured with every number of concurrent requests."""

    contexts: Annotated[tuple[PositiveInt, ...], SEVERAL]
    requests: Annotated[tuple[PositiveInt, ...], SEVERAL]
    new_tokens: PositiveInt
    repeats: PositiveInt
    kv_bytes: PositiveInt = Field(description="memory for the KV cache of each model")
    dtype: str | None = Field(description="None: vLLM's default")
    seed: Seed


class ServingBenchmark(Report):
    """What `crosslayer.bench` returns for engine vllm: how many tokens the caches hold, and throughput.

    The scope of a row of throughput is its configuration: context 512, 4 requests.
    """

    schema_: Literal["crosslayer/bench-serving/5"] = Field(default="crosslayer/bench-serving/5", alias="schema")
    settings: ServingSettings
    engine: str = Field(description="vLLM and its version")

    def layout(self) -> Page:
        """Return the page."""
        settings = self.settings
        candidate, original = self.models
        rows = [row for row in self.rows if row.unit != "s"]
        return Page(
            title=f"Benchmark of {candidate.name} against {original.name} in vLLM",
            subtitle=(
                f"{self.engine} · {readable_bytes(settings.kv_bytes)} of KV cache each · random tokens, "
                f"{settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of alternating runs"
            ),
            cards=[(row.quantity, row.change_text(), f"{row.scope}: {row.verdict}") for row in rows[:5]],
            sentences=self.sentences(),
            panels=[],
            tables=[],
            lead=self.tables(),
        )

    def tables(self) -> list[Table]:
        """Return the table: a row for each quantity and configuration."""
        return [listing(f"Candidate and baseline ({covered(self.settings.repeats)})", self.rows, of="configuration")]

    def sentences(self) -> list[str]:
        """Return what was measured."""
        written = by_verdict([row for row in self.rows if row.unit != "s"])
        written += [f"{one.name}: {one.details['not_saved']}" for one in self.models if "not_saved" in one.details]
        if self.settings.repeats < FEWEST:
            written.append(f"{self.settings.repeats} pairs of runs are {TOO_FEW}.")
        needed = (max(self.settings.contexts) + self.settings.new_tokens) * max(self.settings.requests)
        full = [one.name for one in self.models if int(one.details["kv_tokens"]) < needed]
        if full:
            written.append(f"The KV cache of {listed(full)} is too small for all requests at once, so some wait.")
        return written

"""The result of a benchmark in vLLM, and its page."""

from typing import Any, Literal

from pydantic import Field

from crosslayer.output.formatting import listed, readable_bytes
from crosslayer.output.page import Page, Table
from crosslayer.output.result import Result
from crosslayer.stats.ratios import FEWEST, coverage
from crosslayer.verbs.bench.record import Both, ServedModel, ServingRow, ServingSettings
from crosslayer.verbs.bench.sentences import TOO_FEW, covered


class ServingBenchmark(Result):
    """What `crosslayer.bench` returns for engine vllm: how many tokens the caches hold, and a row per configuration."""

    schema_: Literal["crosslayer/bench-serving/4"] = Field(default="crosslayer/bench-serving/4", alias="schema")
    models: Both[ServedModel]
    settings: ServingSettings
    engine: str = Field(description="vLLM and its version")
    rows: tuple[ServingRow, ...] = Field(min_length=1)
    seconds: float

    @property
    def kv_tokens_ratio(self) -> float:
        """How many tokens the cache holds, candidate / baseline."""
        return self.models.candidate.kv_tokens / self.models.baseline.kv_tokens

    def layout(self) -> Page:
        """Return the page."""
        models, settings = self.models, self.settings
        cards = [("KV tokens", f"{self.kv_tokens_ratio:.2f}x", "the baseline's, in the same memory")]
        for row in self.rows:
            note = f"{row.requests} requests of {row.context} tokens: {row.time.speed}"
            cards.append(("Throughput", row.throughput.text(unit="x"), note))
        return Page(
            title=f"Benchmark of {models.candidate.name} against {models.baseline.name} in vLLM",
            subtitle=(
                f"{self.engine} · {readable_bytes(settings.kv_bytes)} of KV cache each · random tokens, "
                f"{settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of alternating runs"
            ),
            cards=cards,
            sentences=self.sentences(),
            panels=[],
            tables=[],
            lead=self.tables(),
        )

    def tables(self) -> list[Table]:
        """Return the table: a row for each context and number of requests."""
        interval = covered(self.settings.repeats)
        head = ["context", "requests", "tokens/s\ncandidate", "tokens/s\nbaseline", "time\ncandidate / baseline"]
        rows = []
        for row in self.rows:
            speeds = [f"{speed:.1f}" for speed in row.tokens_per_second.both()]
            times = row.time.durations()
            verdict = f"{row.throughput.text(unit='x')} {row.time.speed}"
            rows.append([str(row.context), str(row.requests), *speeds, times, verdict])
        return [("Throughput", [*head, f"throughput ratio\n(candidate ÷ baseline, {interval})"], rows)]

    def sentences(self) -> list[str]:
        """Return what was measured."""
        candidate, baseline = self.models.candidate, self.models.baseline
        models = candidate, baseline
        written = [
            f"KV cache capacity: {self.kv_tokens_ratio:.2f}x the baseline's: "
            f"{readable_bytes(self.settings.kv_bytes)} hold {candidate.kv_tokens:,} tokens of {candidate.name} and "
            f"{baseline.kv_tokens:,} of {baseline.name}."
        ]
        written += [f"{model.name}: {model.not_saved}" for model in models if model.not_saved is not None]
        if self.settings.repeats < FEWEST:
            written.append(f"{self.settings.repeats} pairs of runs are {TOO_FEW}.")
        longest = max(self.settings.contexts) + self.settings.new_tokens
        needed = longest * max(self.settings.requests)
        full = [model.name for model in models if model.kv_tokens < needed]
        if full:
            written.append(f"The KV cache of {listed(full)} is too small for all requests at once, so some wait.")
        return written

    def headline(self) -> dict[str, Any]:
        """Return both names and the ratios."""
        throughput = []
        for row in self.rows:
            ratio, ends = round(row.throughput.value, 3), row.throughput.interval
            interval = ends and [round(end, 3) for end in ends]
            figures = {"context": row.context, "requests": row.requests, "ratio": ratio, "interval": interval}
            throughput.append(figures)
        return {
            "candidate": self.models.candidate.name,
            "baseline": self.models.baseline.name,
            "kv_tokens": [self.models.candidate.kv_tokens, self.models.baseline.kv_tokens],
            "kv_tokens_ratio": round(self.kv_tokens_ratio, 4),
            "interval_coverage": coverage(self.settings.repeats),
            "throughput": throughput,
        }

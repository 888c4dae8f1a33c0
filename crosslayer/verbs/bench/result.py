"""The result of a benchmark."""

from typing import Any, Literal

from pydantic import Field

from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.stats.ratios import coverage
from crosslayer.verbs.bench.record import BenchSettings, Both, MeasuredModel, Row, Skip


class Benchmark(Result):
    """What `crosslayer.bench` returns: a row for each configuration (context, batch size), and a page."""

    schema_: Literal["crosslayer/bench/7"] = Field(default="crosslayer/bench/7", alias="schema")
    models: Both[MeasuredModel]
    settings: BenchSettings
    rows: tuple[Row, ...] = Field(min_length=1)
    skipped: tuple[Skip, ...]
    seconds: float

    def tables(self) -> list[Table]:
        """Return the short table: a row for each context and batch size."""
        return [self.sibling("page").overview(self)]

    def headline(self) -> dict[str, Any]:
        """Return both names, the coverage of the intervals, and the ratios of every configuration."""
        return {
            "candidate": self.models.candidate.name,
            "baseline": self.models.baseline.name,
            "interval_coverage": coverage(self.settings.repeats),
            "results": [_figures(row) for row in self.rows],
        }


def _figures(row: Row) -> dict[str, Any]:
    cache = row.cache.dynamic
    figures: dict[str, Any] = {
        "context": row.context,
        "batch": row.batch,
        "attention": row.attention,
        "kv_share": round(cache.share, 4),
    }
    figures |= {"allocated_bytes": cache.candidate, "baseline_allocated_bytes": cache.baseline}
    for measure, time in row.times().items():
        interval = time.change.interval and [round(end, 3) for end in time.change.interval]
        figures[measure] = {"ratio": round(time.change.value, 3), "interval": interval}
    return figures

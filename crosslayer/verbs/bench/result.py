"""The result of a benchmark."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.verbs.bench.record import BenchSettings, Both, MeasuredModel, Row, Skip


class Benchmark(Result):
    """What `crosslayer.bench` returns: a row for each of N configurations (context, batch size), arrays and a page.

    The axis of measures is `record.MEASURES`: time to first token, time per further token with a dynamic and with a
    static cache. The axis of models is candidate, baseline.
    """

    schema_: Literal["crosslayer/bench/6"] = Field(default="crosslayer/bench/6", alias="schema")
    models: Both[MeasuredModel]
    settings: BenchSettings
    rows: tuple[Row, ...] = Field(min_length=1)
    skipped: tuple[Skip, ...]
    interval_coverage: float = Field(ge=0, le=1, description="coverage of the intervals of the median ratio")
    seconds: float

    @property
    def ratios(self) -> np.ndarray:
        """Median ratios candidate / baseline of times over pairs of runs, by measure, (N, 3)."""
        return np.array([[time.ratio for time in row.times().values()] for row in self.rows])

    @property
    def intervals(self) -> np.ndarray:
        """Lower and upper ends of the intervals of `ratios`, (N, 3, 2); NaN without an interval."""
        none = (np.nan, np.nan)
        return np.array([[time.interval or none for time in row.times().values()] for row in self.rows])

    def tables(self) -> list[Table]:
        """Return the short table: a row for each context and batch size."""
        return [self.sibling("page").overview(self)]

    def headline(self) -> dict[str, Any]:
        """Return both names, the coverage of the intervals, and the ratios of every configuration."""
        return {
            "candidate": self.models.candidate.name,
            "baseline": self.models.baseline.name,
            "interval_coverage": self.interval_coverage,
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
        interval = time.interval and [round(end, 3) for end in time.interval]
        figures[measure] = {"ratio": round(time.ratio, 3), "interval": interval}
    return figures

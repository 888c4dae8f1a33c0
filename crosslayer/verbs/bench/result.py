"""The result of a bench."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.verbs.bench.record import BenchSettings, Both, MeasuredModel, Row, Skip


class Benchmark(Result):
    """What `crosslayer.bench` returns: a row for each of N settings, typed, as arrays, and as a page.

    The axis of measures is `record.MEASURES`: time to first token, time per further token with a dynamic and with a
    static cache. The axis of sides is candidate, baseline.
    """

    schema_: Literal["crosslayer/bench/3"] = Field(default="crosslayer/bench/3", alias="schema")
    models: Both[MeasuredModel]
    settings: BenchSettings
    rows: tuple[Row, ...] = Field(min_length=1)
    skipped: tuple[Skip, ...]
    no_prediction: str | None = Field(description="why nothing is predicted")
    interval_coverage: float = Field(ge=0, le=1, description="how often an interval of so many pairs holds the median")
    seconds: float

    @property
    def contexts(self) -> np.ndarray:
        """Lengths of the prompt in tokens, (N,)."""
        return np.array([row.context for row in self.rows])

    @property
    def batches(self) -> np.ndarray:
        """Batch sizes, (N,)."""
        return np.array([row.batch for row in self.rows])

    @property
    def cache_bytes(self) -> np.ndarray:
        """Bytes that a dynamic cache of each side allocates, (N, 2)."""
        return np.array([row.cache.dynamic.sides() for row in self.rows])

    @property
    def cache_ratios(self) -> np.ndarray:
        """Bytes of a dynamic cache, candidate / baseline, (N,)."""
        return np.array([row.cache.dynamic.ratio for row in self.rows])

    @property
    def medians(self) -> np.ndarray:
        """Seconds, the median over repeats by measure and side, (N, 3, 2)."""
        times = [[[side.median for side in time.sides()] for time in row.times().values()] for row in self.rows]
        return np.array(times)

    @property
    def ratios(self) -> np.ndarray:
        """Times, candidate / baseline, the median over pairs by measure, (N, 3)."""
        return np.array([[time.ratio for time in row.times().values()] for row in self.rows])

    @property
    def intervals(self) -> np.ndarray:
        """Lower and upper ends of those ratios, (N, 3, 2); NaN where there is none."""
        none = (np.nan, np.nan)
        return np.array([[time.interval or none for time in row.times().values()] for row in self.rows])

    @property
    def predicted_ratios(self) -> np.ndarray:
        """Those ratios as predicted, (N, 3); NaN where nothing is predicted."""
        ratios = [[time.predicted_ratio for time in row.times().values()] for row in self.rows]
        return np.array(ratios, dtype=float)

    def tables(self) -> list[Table]:
        """Return the short table: a row for each setting."""
        return [self.sibling("page").overview(self)]

    def headline(self) -> dict[str, Any]:
        """Return both names, what an interval covers, and the ratios of every setting."""
        return {
            "candidate": self.models.candidate.name,
            "baseline": self.models.baseline.name,
            "interval_coverage": self.interval_coverage,
            "results": [_figures(row) for row in self.rows],
        }


def _figures(row: Row) -> dict[str, Any]:
    cache = round(row.cache.dynamic.ratio, 4)
    figures: dict[str, Any] = {"context": row.context, "batch": row.batch, "cache": cache}
    for measure, time in row.times().items():
        interval = time.interval and [round(end, 3) for end in time.interval]
        figures[measure] = {"ratio": round(time.ratio, 3), "interval": interval}
    return figures

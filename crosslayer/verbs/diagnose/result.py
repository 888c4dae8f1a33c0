"""The result of a diagnosis: its record with the arrays, and its page."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.record import PositionBins
from crosslayer.output.result import Result
from crosslayer.verbs.diagnose import record as parts


class Diagnosis(Result):
    """What `diagnose` measured of a model, and what that means (`verdict`, and `words` in sentences).

    Every measure in `measures` is an attribute here too: `diagnosis.entropy` is the array of its means over sequences,
    float64, NaN where a layer has no such sublayer; `diagnosis.measures.entropy.interval` is its interval, (L, 2), None
    for a single sequence. Layers and positions count from 0. docs/MEASURES.md has definitions and sources.
    """

    schema_: Literal["crosslayer/diagnosis/3"] = Field(default="crosslayer/diagnosis/3", alias="schema")
    model: parts.DiagnosedModel
    settings: parts.Settings
    measures: parts.Measures
    by_stream: parts.ByStream | None = None
    cross_layer: parts.CrossLayer | None
    depth_weights: parts.DepthWeights | None = None
    importance_by_position: PositionBins
    top_tokens: list[list[parts.TopToken]]
    position_table: parts.PositionTable | None
    verdict: parts.Verdict
    words: list[str] = Field(description="the verdict in sentences")
    seconds: float

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        """Refuse measures that are not of the model's layers and streams."""
        layers = self.model.layers
        for part in (self.measures, self.cross_layer, self.by_stream):
            for name, measure in part or ():
                if measure is None:
                    continue
                shape, interval = measure.array.shape, measure.interval
                own = (
                    (self.model.streams,) if part is self.by_stream else (layers,) if name in parts.PAIRS else shape[1:]
                )
                if shape != (layers, *own):
                    of = f"{layers} layers" + (f" and {own[0]} streams" if part is self.by_stream else "")
                    raise ValueError(f"{name} has the shape {shape}, and the model has {of}")
                if interval is not None and interval.shape != (*shape, 2):
                    raise ValueError(f"{name} has the shape {shape}, and its interval {interval.shape}")
        return self

    def __getattr__(self, name: str) -> np.ndarray:
        """Return the means of a measure over sequences; fields of `Measures` say its shape and unit."""
        if name in parts.Measures.model_fields:
            return getattr(self.measures, name).array
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *parts.Measures.model_fields]

    def sentences(self) -> list[str]:
        """Return the verdict in sentences."""
        return self.words

    def headline(self) -> dict[str, Any]:
        """Return the figures of the last line of the command line."""
        sink, cache = self.verdict.sink, self.verdict.cache
        kept = [] if cache is None else cache.by_depth.kept
        peaks = self.hidden_norm_ratio[np.isfinite(self.hidden_norm_ratio)]
        return {
            "model": self.model.name,
            "sink_layers": sink.layers,
            "strongest_sink": {"layer": sink.strongest, "share": round(sink.strongest_share, 4)},
            "hidden_norm_ratio_max": round(float(peaks.max()), 2) if len(peaks) else None,
            "kv_share": {entry.method: round(entry.share, 4) for entry in kept},
            "seconds": round(self.seconds, 2),
        }

"""The result of a diagnosis: its record with the arrays, and its page."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.record import PositionBins
from crosslayer.output.result import Result
from crosslayer.verbs.diagnose.record import (
    PAIRS,
    ByStream,
    CrossLayer,
    DepthWeights,
    Measures,
    ModelFacts,
    PositionTable,
    Settings,
    TopToken,
    Verdict,
)


class Diagnosis(Result):
    """What `diagnose` measured of a model, and what that means (`verdict`, and `words` in sentences).

    Arrays are means over sequences in float64, with L layers of the stack, NaN where a layer has no such sublayer. The
    interval of any of them is beside it in `measures`: `diagnosis.measures.entropy.interval`, (L, 2), None for a single
    sequence. Layers and positions count from 0. docs/MEASURES.md has each measure's definition and source.
    """

    schema_: Literal["crosslayer/diagnosis/2"] = Field(default="crosslayer/diagnosis/2", alias="schema")
    model: ModelFacts
    settings: Settings
    measures: Measures
    by_stream: ByStream | None = None
    cross_layer: CrossLayer | None
    depth_weights: DepthWeights | None = None
    importance_by_position: PositionBins
    top_tokens: list[list[TopToken]]
    position_table: PositionTable | None
    verdict: Verdict
    words: list[str] = Field(description="the verdict in sentences")
    seconds: float

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        """Refuse measures that are not of the model's layers."""
        layers = self.model.layers
        measures = list(self.measures) + (list(self.cross_layer) if self.cross_layer is not None else [])
        single = list(self.by_stream) if self.by_stream is not None else []
        for name, measure in [*measures, *((name, measure) for name, measure in single if measure is not None)]:
            mean, interval = measure.array, measure.interval
            if mean.shape[0] != layers or (name in PAIRS and mean.shape != (layers, layers)):
                raise ValueError(f"{name} has the shape {mean.shape}, and the model has {layers} layers")
            if interval is not None and interval.shape != (*mean.shape, 2):
                raise ValueError(f"{name} has the shape {mean.shape}, and its interval {interval.shape}")
        for name, measure in single:
            if measure is not None and measure.array.shape != (layers, self.model.streams):
                raise ValueError(
                    f"{name} has the shape {measure.array.shape}; the model has {self.model.streams} streams"
                )
        return self

    @property
    def first_token_share(self) -> np.ndarray:
        """The first token's share of all attention, (L,), 0 to 1."""
        return self.measures.first_token_share.array

    @property
    def entropy(self) -> np.ndarray:
        """Entropy of token importance, (L,), in nats; ln T for an even spread over T tokens."""
        return self.measures.entropy.array

    @property
    def top_importance(self) -> np.ndarray:
        """The ten largest shares of attention of a sequence, largest first, (L, 10), or (L, T) of shorter sequences."""
        return self.measures.top_importance.array

    @property
    def sink_rate(self) -> np.ndarray:
        """Share of heads that give the first token more than 0.3 of their attention, (L,), 0 to 1."""
        return self.measures.sink_rate.array

    @property
    def value_norm_ratio(self) -> np.ndarray:
        """Norm of the first token's values over the median of the others, (L,)."""
        return self.measures.value_norm_ratio.array

    @property
    def hidden_norm_ratio(self) -> np.ndarray:
        """Norm of the first token's hidden state, entering a layer, over the median of the others, (L,)."""
        return self.measures.hidden_norm_ratio.array

    @property
    def mlp_l1_l2(self) -> np.ndarray:
        """L1 over L2 norm of what the MLP adds to the first token, (L,), 1 to √C for C channels."""
        return self.measures.mlp_l1_l2.array

    @property
    def mlp_l1_l2_others(self) -> np.ndarray:
        """The same, median of the other tokens, (L,)."""
        return self.measures.mlp_l1_l2_others.array

    @property
    def token_similarity(self) -> np.ndarray:
        """Mean cosine of all pairs of different tokens' hidden states, entering a layer, (L,)."""
        return self.measures.token_similarity.array

    @property
    def value_spectrum(self) -> np.ndarray:
        """Eigenvalues of the values' second moment, all heads in a single vector, largest first, (L, H_kv·D)."""
        return self.measures.value_spectrum.array

    @property
    def map_similarity(self) -> np.ndarray:
        """Cosine of the head-averaged maps of two layers, (L, L)."""
        return self.measures.map_similarity.array

    @property
    def map_similarity_without_first(self) -> np.ndarray:
        """The same with the first column of the maps set aside, (L, L)."""
        return self.measures.map_similarity_without_first.array

    @property
    def map_similarity_per_head(self) -> np.ndarray:
        """Cosine of the maps of equally numbered heads of two layers, averaged over heads, (L, L)."""
        return self.measures.map_similarity_per_head.array

    @property
    def attention_io_similarity(self) -> np.ndarray:
        """Mean over tokens of cos(x, x + Attn(x)), (L,); near 1 where attention changes little."""
        return self.measures.attention_io_similarity.array

    @property
    def layer_io_similarity(self) -> np.ndarray:
        """Mean over tokens of cos(x, layer(x)), (L,); near 1 where the layer changes little."""
        return self.measures.layer_io_similarity.array

    @property
    def stream_norm(self) -> np.ndarray:
        """Mean L2 norm of the hidden states that enter a layer, (L,)."""
        return self.measures.stream_norm.array

    def sentences(self) -> list[str]:
        """Return the verdict in sentences."""
        return self.words

    def headline(self) -> dict[str, Any]:
        """Return the figures of the last line of the command line."""
        sink, cache = self.verdict.sink, self.verdict.cache
        kept = [] if cache is None else cache.by_depth.kept
        peaks = self.hidden_norm_ratio[np.isfinite(self.hidden_norm_ratio)]
        return {
            "model": self.settings.model,
            "sink_layers": sink.layers,
            "strongest_sink": {"layer": sink.strongest, "share": round(sink.strongest_share, 4)},
            "hidden_norm_ratio_max": round(float(peaks.max()), 2) if len(peaks) else None,
            "kv_share": {entry.method: round(entry.share, 4) for entry in kept},
            "seconds": round(self.seconds, 2),
        }

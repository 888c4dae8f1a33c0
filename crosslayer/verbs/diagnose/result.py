"""The result of a diagnosis: the content of `record.json`, with its measures as arrays."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.record import Frozen, Measure, ModelFacts, PositionBins
from crosslayer.output.result import Result

PAIRS = ("map_similarity", "map_similarity_without_first", "map_similarity_per_head")  # measures of two layers


class ProbedModel(ModelFacts):
    """The model that was measured."""

    type: str
    hidden_size: int = Field(ge=1)


class DiagnosedModel(ProbedModel):
    """The model with its attention; `masks` describes the mask of each layer, None for a layer without attention."""

    attention_layers: int
    heads: int
    kv_heads: int
    attention: str | None
    masks: list[str | None]
    streams: int = Field(default=1, description="residual streams")
    over_depth: bool = Field(default=False, description="whether layers read by attention over depth")


class TextSettings(Frozen):
    """The text of a measurement and how it was cut; for token ids `text` and `bos` are None, `documents` empty."""

    text: str | None = Field(description="the name of the text")
    documents: list[int] = Field(description="index of the document of each sequence, -1 if joined from several")
    sequences: int = Field(ge=1)
    length: int = Field(ge=2)
    seed: int | None
    bos: str | None
    prefix: list[int] = Field(default=[], description="ids that every sequence begins with, if a prefix was given")


class Settings(TextSettings):
    """What was measured; `seed` is None for token ids."""

    cross_layer: bool


class Measures(Frozen):
    """Every measure by layer, None where a layer has no such sublayer.

    docs/guides/inspect.md has equations and sources.
    """

    first_token_share: Measure = Field(description="the first token's share of all attention, (L,), 0 to 1")
    first_token_by_head: Measure = Field(description="mean attention of a head's rows to token 0, (L, H), 0 to 1")
    entropy: Measure = Field(description="entropy of the attention that tokens receive, (L,), nats; ln T if even")
    top_importance: Measure = Field(description="ten largest shares of attention, largest first, (L, 10), at most T")
    sink_rate: Measure = Field(description="share of heads that give token 0 more than 0.3 of attention, (L,), 0 to 1")
    value_norm_ratio: Measure = Field(description="norm of token 0's values over the median of the others, (L,)")
    key_norm_ratio: Measure = Field(description="the same of its keys, (L,)")
    query_key_cosine: Measure = Field(description="mean cosine of later queries with token 0's key, (L,)")
    query_key_cosine_others: Measure = Field(description="the same with the keys between, (L,)")
    first_contribution: Measure = Field(
        description="token 0's share of attention times the norm of the values, over rows and heads, (L,), 0 to 1"
    )
    hidden_norm_ratio: Measure = Field(description="the same of the hidden states at the input of a layer, (L,)")
    mlp_l1_l2: Measure = Field(description="L1 over L2 norm of the MLP's output at token 0, (L,), 1 to √C")
    mlp_l1_l2_others: Measure = Field(description="the same, median of the other tokens, (L,)")
    token_similarity: Measure = Field(description="mean cosine of different tokens' hidden states, (L,)")
    value_spectrum: Measure = Field(description="eigenvalues of the values' second moment, falling, (L, H_kv·D)")
    map_similarity: Measure = Field(description="cosine of the head-averaged maps of two layers, (L, L)")
    map_similarity_without_first: Measure = Field(description="the same without the maps' first column, (L, L)")
    map_similarity_per_head: Measure = Field(description="cosine of the maps of equal heads, mean over heads, (L, L)")
    attention_io_similarity: Measure = Field(description="mean over tokens of cos(x, x + Attn(x)), (L,)")
    layer_io_similarity: Measure = Field(description="mean over tokens of cos(x, layer(x)), (L,)")
    stream_norm: Measure = Field(description="mean L2 norm of the hidden states at the input of a layer, (L,)")
    depth_factor: Measure = Field(description="mean over tokens of ‖layer(x) − x‖ / ‖x‖, (L,)")


class ByStream(Frozen):
    """The measures of each of N residual streams, (L, N); those in `Measures` are of the mean of the streams.

    `attention_io_similarity` is None if attention does not write to the streams directly.
    """

    hidden_norm_ratio: Measure
    token_similarity: Measure
    layer_io_similarity: Measure
    stream_norm: Measure
    attention_io_similarity: Measure | None = None


class CrossLayer(Frozen):
    """Cosines of approximations with attention over two layers, and how a map of the keys below responds, (L,)."""

    current_previous: Measure
    current_first: Measure
    identity_previous: Measure
    identity_first: Measure
    softmax_jacobian: Measure | None = None
    map_response: Measure | None = None


class Outputs(Frozen):
    """What sublayers add to the residual stream, and the gradient of the summed loss by it: mean norms over tokens."""

    attention_output_norm: Measure
    mlp_output_norm: Measure
    attention_gradient_norm: Measure
    mlp_gradient_norm: Measure
    slopes: dict[str, Measure] = Field(
        description="of the log of each norm (attention_output, …) over depth, in nats a layer, by least squares"
    )


class DepthWeights(Frozen):
    """What each sublayer's input takes from earlier outputs; None where a source comes later, or nothing is known.

    The first source is the embedding, or what each residual stream has of it; the last reader is the output.
    """

    readers: list[str]
    sources: list[str]
    weights: Measure = Field(description="(readers, sources)")
    streams: Measure | None = Field(
        default=None, description="(readers, streams): the weight of each residual stream, where there are several"
    )
    pairs: Measure | None = Field(
        default=None, description="(readers, sources × streams), streams fastest: what is taken of a source by stream"
    )


class OutputGates(Frozen):
    """What multiplies the heads' outputs before W_o, and attention after it; None in a layer without such a gate."""

    mean: Measure = Field(description="mean over tokens and channels, (L, H), 0 to 1")
    first_token_share: Measure = Field(description="the first token's share, rows weighted by the gate, (L,), 0 to 1")
    importance_by_position: PositionBins = Field(description="the share of each token, in the same way")

    @property
    def most_closed(self) -> tuple[int, float]:
        """The layer whose gates are most closed, and their mean over heads."""
        gates = self.mean.array()  # (L, H)
        layers = [layer for layer, row in enumerate(gates) if not np.isnan(row).all()]
        least = min(layers, key=lambda layer: float(np.nanmean(gates[layer])))
        return least, float(np.nanmean(gates[least]))


class TopToken(Frozen):
    """A token that receives much of a layer's attention: its text, its share, and its positions.

    `first` marks the first position, which is counted separately from other occurrences of the same token.
    """

    token: str
    first: bool
    share: float
    positions: list[int]


class PositionTable(Frozen):
    """A learned position table: its name, the L2 norm of each row, and the rows with outlying norms."""

    name: str
    norms: list[float]
    median: float
    outliers: list[int]


class Sink(Frozen):
    """Where the first token is an attention sink, and where its values are small."""

    layers: list[int] = Field(
        description="layers that give it more than SINK_SHARE of their attention, and over twice an even share"
    )
    strongest: int
    strongest_share: float
    over_even: float = Field(description="share of the strongest layer over that of even attention")
    drains: list[int] = Field(description="layers where its values have a small norm")


class Massive(Frozen):
    """Massive activations: channels of a hidden state above 100, and above 1,000 times the median magnitude."""

    layers: list[int] = Field(description="layers at whose input there is one")
    channels: list[int] = Field(description="of all these layers, most frequent first")
    value: float = Field(description="the largest")
    ratio: float = Field(description="the largest over the median magnitude of its layer's hidden states")


class RankedLayer(Frozen):
    """A layer and the cosine of its input and output: near 1, it changes little."""

    layer: int
    similarity: float


class Redundancy(Frozen):
    """Layers ranked by how little they change their input, least first: attention alone, and the whole layer."""

    attention: list[RankedLayer]
    layers: list[RankedLayer]


class Statistics(Frozen):
    """Statistics of the similarity of neighboring layers' attention maps over all layers (2502.00439, Table 11)."""

    mean: float
    top_less_bottom: float | None = Field(description="mean of the upper half minus mean of the lower half")
    largest: float
    smallest: float
    deviation: float = Field(description="standard deviation")


class Neighbors(Frozen):
    """Mean similarity of the attention maps of neighboring layers in the upper half, or None."""

    map_similarity: float | None
    map_similarity_without_first: float | None
    statistics: Statistics | None = None
    statistics_without_first: Statistics | None = None


class KeptShare(Frozen):
    """The share of the cached elements that a method would keep; `title` is the name of its class."""

    method: str
    title: str
    share: float


class Superblocks(Frozen):
    """Groups of layers that could share, and the share of the cache that each method would keep."""

    groups: list[list[int]]
    kept: list[KeptShare]


class CacheCandidates(Frozen):
    """Candidates for a smaller KV cache; that of `length` tokens has `elements` numbers."""

    length: int
    elements: int
    by_depth: Superblocks = Field(description="the superblocks of arXiv 2502.00439")
    by_similarity: Superblocks = Field(description="grouped by `map_similarity_without_first`")
    least_attention: list[int] = Field(description="layers whose attention changes its input least")
    share_without: float = Field(description="share of the cache kept if those layers lose their attention")


class Verdict(Frozen):
    """What the measures mean, in numbers; `cache` is None for a model without a KV cache."""

    sink: Sink
    redundancy: Redundancy
    neighbors: Neighbors
    cache: CacheCandidates | None
    massive: Massive | None = Field(default=None, description="massive activations of the first token")
    massive_others: Massive | None = Field(default=None, description="those of other tokens")


class Diagnosis(Result):
    """The measurements of `diagnose`; `verdict` sums them up in numbers, `sentences()` in words.

    Every measure in `measures` is an attribute here too: `diagnosis.entropy` is the array of its means over sequences,
    float64, NaN where a layer has no such sublayer; `diagnosis.measures.entropy.interval()` is its 95% interval,
    (L, 2), None for a single sequence. Layers and positions count from 0. Definitions: docs/guides/inspect.md.
    """

    schema_: Literal["crosslayer/diagnose/10"] = Field(default="crosslayer/diagnose/10", alias="schema")
    model: DiagnosedModel
    settings: Settings
    measures: Measures
    by_stream: ByStream | None = None
    cross_layer: CrossLayer | None
    outputs: Outputs | None = None
    depth_weights: DepthWeights | None = None
    depth_unknown: str | None = Field(default=None, description="which weights over depth are not known, and why")
    output_gates: OutputGates | None = Field(default=None, description="None if no layer has one")
    importance_by_position: PositionBins
    value_norms_by_position: PositionBins = Field(description="L2 norm over the head size, mean over key-value heads")
    hidden_norms_by_position: PositionBins = Field(description="L2 norm at the input of a layer")
    last_row_by_position: PositionBins = Field(description="attention of the last token to each position")
    prefix_share: Measure | None = Field(default=None, description="a' of each of the prefix's n tokens, (L, n)")
    top_tokens: list[list[TopToken]]
    top_channels: list[list[tuple[int, float, float]]] = Field(
        description="largest channels of the MLP's output at token 0, by layer: index, value, magnitude over the median"
    )
    top_activations: list[list[tuple[int, float, float]]] = Field(
        default=[],
        description="largest channels of token 0's hidden state at the input of a layer: index, value, magnitude over "
        "the median of the layer's hidden states",
    )
    top_activations_others: list[list[tuple[int, float, float]]] = Field(
        default=[], description="the same of the other tokens, each channel at the token where it is largest"
    )
    position_table: PositionTable | None
    verdict: Verdict
    baseline: "Diagnosis | None" = Field(default=None, description="of the model that it is compared with, same text")
    seconds: float

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        """Raise if a measure does not have one entry for each layer or stream of the model."""
        layers = self.model.layers
        for measures in (self.measures, self.cross_layer, self.outputs, self.by_stream):
            for name, measure in measures or ():
                if isinstance(measure, Measure):
                    free = (layers,) if name in PAIRS else measure.array().shape[1:]
                    measure.check(name, (layers, *((self.model.streams,) if measures is self.by_stream else free)))
        return self

    def __getattr__(self, name: str) -> np.ndarray:
        """Return the means of a measure over sequences; `Measures` documents shapes and units."""
        if name in Measures.model_fields:
            measure = getattr(self.measures, name)
            if measure is None:
                raise AttributeError(f"this record has no {name!r}, which is newer; run diagnose again")
            return measure.array()
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *Measures.model_fields]

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the next command; None for an encoder, which has no cache to make smaller."""
        return None if self.verdict.cache is None else super().next_command(model, out)

    def headline(self) -> dict[str, Any]:
        """Return the few numbers that the command line prints last."""
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

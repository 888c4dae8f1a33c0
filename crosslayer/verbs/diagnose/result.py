"""The result of a diagnosis: what `record.json` holds, with the arrays."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.record import Frozen, Measure, ModelFacts, PositionBins
from crosslayer.output.result import Result

PAIRS = ("map_similarity", "map_similarity_without_first", "map_similarity_per_head")  # measures of two layers


class ProbedModel(ModelFacts):
    """A model that was looked into."""

    type: str
    hidden_size: int = Field(ge=1)


class DiagnosedModel(ProbedModel):
    """Its layers as well; `masks` has words for each, None where it has no attention."""

    attention_layers: int
    heads: int
    kv_heads: int
    attention: str | None
    masks: list[str | None]
    streams: int = Field(default=1, description="residual streams")
    over_depth: bool = Field(default=False, description="whether layers read by attention over depth")


class TextSettings(Frozen):
    """The text of a measurement, and how it was cut. For token ids `text` and `bos` are None, `documents` is empty."""

    text: str | None = Field(description="as a result calls it")
    documents: list[int] = Field(description="number of each sequence's document, -1: joined from several")
    sequences: int = Field(ge=1)
    length: int = Field(ge=2)
    seed: int | None
    bos: str | None


class Settings(TextSettings):
    """What was measured; `seed` is None for token ids."""

    cross_layer: bool


class Measures(Frozen):
    """Every measure by layer, None where a layer has no such sublayer; docs/reference/measures.md has equations and sources."""

    first_token_share: Measure = Field(description="the first token's share of all attention, (L,), 0 to 1")
    entropy: Measure = Field(description="of token importance, (L,), nats; ln T for an even spread over T tokens")
    top_importance: Measure = Field(description="ten largest shares of attention, largest first, (L, 10), at most T")
    sink_rate: Measure = Field(description="share of heads that give token 0 more than 0.3 of attention, (L,), 0 to 1")
    value_norm_ratio: Measure = Field(description="norm of token 0's values over the median of the others, (L,)")
    hidden_norm_ratio: Measure = Field(description="the same of hidden states that enter a layer, (L,)")
    mlp_l1_l2: Measure = Field(description="L1 over L2 norm of what the MLP adds to token 0, (L,), 1 to √C")
    mlp_l1_l2_others: Measure = Field(description="the same, median of the other tokens, (L,)")
    token_similarity: Measure = Field(description="mean cosine of different tokens' hidden states, (L,)")
    value_spectrum: Measure = Field(description="eigenvalues of the values' second moment, falling, (L, H_kv·D)")
    map_similarity: Measure = Field(description="cosine of the head-averaged maps of two layers, (L, L)")
    map_similarity_without_first: Measure = Field(description="the same without the maps' first column, (L, L)")
    map_similarity_per_head: Measure = Field(description="the same of equally numbered heads, mean over heads, (L, L)")
    attention_io_similarity: Measure = Field(description="mean over tokens of cos(x, x + Attn(x)), (L,)")
    layer_io_similarity: Measure = Field(description="mean over tokens of cos(x, layer(x)), (L,)")
    stream_norm: Measure = Field(description="mean L2 norm of the hidden states that enter a layer, (L,)")


class ByStream(Frozen):
    """The stream measures of each of N residual streams, (L, N); those in `Measures` are of their mean.

    `attention_io_similarity` is None where attention does not write the streams itself.
    """

    hidden_norm_ratio: Measure
    token_similarity: Measure
    layer_io_similarity: Measure
    stream_norm: Measure
    attention_io_similarity: Measure | None = None


class CrossLayer(Frozen):
    """How well short forms stand for attention over two layers, cosines (L,); None where there is no other layer."""

    current_previous: Measure
    current_first: Measure
    identity_previous: Measure
    identity_first: Measure


class DepthWeights(Frozen):
    """What sublayers read over depth: mean weights (readers, sources), None where a source comes after its reader.

    The first source is the embedding, the last reader the output.
    """

    readers: list[str]
    weights: Measure


class TopToken(Frozen):
    """A token that holds much of a layer's attention: its text, its share, and where it stood.

    `first` marks the first position, which is kept apart from other occurrences of the same token.
    """

    token: str
    first: bool
    share: float
    positions: list[int]


class PositionTable(Frozen):
    """A learned position table: its name, the L2 norm of each row, and the rows whose norm stands out."""

    name: str
    norms: list[float]
    median: float
    outliers: list[int]


class Sink(Frozen):
    """Where attention goes to the first token, and what becomes of that token's states."""

    layers: list[int] = Field(
        description="that give it more than SINK_SHARE of their attention, and twice an even share"
    )
    strongest: int
    strongest_share: float
    over_even: float = Field(description="the strongest layer's share over what even attention would give")
    peaks: list[int] = Field(description="layers that its hidden state enters with a huge norm")
    drains: list[int] = Field(description="layers where its value states are small")


class RankedLayer(Frozen):
    """A layer and how little it changes: the cosine of what enters and what leaves."""

    layer: int
    similarity: float


class Redundancy(Frozen):
    """Layers by how little they change, the least first: their attention alone, and the whole layer."""

    attention: list[RankedLayer]
    layers: list[RankedLayer]


class Neighbours(Frozen):
    """Mean similarity of the maps of consecutive layers in the top half; None without such a pair."""

    map_similarity: float | None
    map_similarity_without_first: float | None


class KeptShare(Frozen):
    """The share of the cached elements that would stay with a method, by its name and its class."""

    method: str
    title: str
    share: float


class Superblocks(Frozen):
    """Groups of layers that may share, and what would stay of the cache, by method."""

    groups: list[list[int]]
    kept: list[KeptShare]


class CacheCandidates(Frozen):
    """What could be saved of the KV cache of `length` tokens, which has `elements` numbers."""

    length: int
    elements: int
    by_depth: Superblocks = Field(description="the superblocks of arXiv 2502.00439")
    by_similarity: Superblocks = Field(description="grouped by `map_similarity_without_first`")
    least_attention: list[int] = Field(description="layers whose attention changes least")
    share_without: float = Field(description="of the cache that would stay without attention in those")


class Verdict(Frozen):
    """What the measures say, in numbers; `cache` is None for a model that keeps none."""

    sink: Sink
    redundancy: Redundancy
    neighbours: Neighbours
    cache: CacheCandidates | None


class Diagnosis(Result):
    """What `diagnose` measured of a model, and what that means (`verdict`, and `words` in sentences).

    Every measure in `measures` is an attribute here too: `diagnosis.entropy` is the array of its means over sequences,
    float64, NaN where a layer has no such sublayer; `diagnosis.measures.entropy.interval` is its interval, (L, 2), None
    for a single sequence. Layers and positions count from 0. docs/reference/measures.md has definitions and sources.
    """

    schema_: Literal["crosslayer/diagnose/4"] = Field(default="crosslayer/diagnose/4", alias="schema")
    model: DiagnosedModel
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
        """Refuse measures that are not of the model's layers and streams."""
        layers = self.model.layers
        for part in (self.measures, self.cross_layer, self.by_stream):
            for name, measure in part or ():
                if measure is not None:
                    free = (layers,) if name in PAIRS else measure.array.shape[1:]
                    measure.check(name, (layers, *((self.model.streams,) if part is self.by_stream else free)))
        return self

    def __getattr__(self, name: str) -> np.ndarray:
        """Return the means of a measure over sequences; fields of `Measures` say its shape and unit."""
        if name in Measures.model_fields:
            return getattr(self.measures, name).array
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *Measures.model_fields]

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

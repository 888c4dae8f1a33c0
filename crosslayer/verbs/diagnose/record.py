"""What `record.json` of a diagnosis holds: plain data whose keys are the attributes here."""

from pydantic import Field

from crosslayer.output.record import Frozen, Measure, Options, typed_command

PAIRS = ("map_similarity", "map_similarity_without_first", "map_similarity_per_head")  # measures of two layers


class ModelFacts(Frozen):
    """What is known of the model itself; `masks` has words for each layer, None where it has no attention.

    `streams` is the number of residual streams, and `over_depth` says that layers read by attention over depth.
    """

    class_: str = Field(validation_alias="class", serialization_alias="class")
    type: str
    layers: int
    attention_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    parameters: int
    dtype: str
    attention: str | None
    masks: list[str | None]
    streams: int = 1
    over_depth: bool = False


class Settings(Options):
    """What was measured: `model` and `text` as a result calls them, and how the text was cut.

    For token ids `text`, `seed` and `bos` are None and `documents` is empty.
    """

    model: str
    text: str | None
    documents: list[int] = Field(description="number of each sequence's document, -1: joined from several")
    sequences: int
    length: int
    seed: int | None
    bos: str | None
    cross_layer: bool
    command: str | None = typed_command()


class Measures(Frozen):
    """Every measure by layer; docs/MEASURES.md says what each is and where it comes from.

    A mean has the shape (L,), (L, L) for similarities of maps, (L, 10) for `top_importance`, (L, H_kv·D) for
    `value_spectrum`, with None where a layer has no such sublayer.
    """

    first_token_share: Measure
    entropy: Measure
    top_importance: Measure
    sink_rate: Measure
    value_norm_ratio: Measure
    hidden_norm_ratio: Measure
    mlp_l1_l2: Measure
    mlp_l1_l2_others: Measure
    token_similarity: Measure
    value_spectrum: Measure
    map_similarity: Measure
    map_similarity_without_first: Measure
    map_similarity_per_head: Measure
    attention_io_similarity: Measure
    layer_io_similarity: Measure
    stream_norm: Measure


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
    begins: int | None = Field(description="the first of them")
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
    """Groups of layers that may share, the followers among them, and what would stay of the cache, by method."""

    groups: list[list[int]]
    followers: int
    kept: list[KeptShare]


class AttentionRemoved(Frozen):
    """Layers whose attention changes least, and what would stay of the cache without it."""

    layers: list[int]
    share: float


class CacheCandidates(Frozen):
    """What could be saved of the KV cache of `length` tokens, which has `elements` numbers.

    `by_depth` are the superblocks of arXiv 2502.00439, `by_similarity` those of the measure `resting_on`.
    """

    length: int
    elements: int
    by_depth: Superblocks
    by_similarity: Superblocks
    resting_on: str
    attention_removed: AttentionRemoved


class Verdict(Frozen):
    """What the measures say, in numbers; `cache` is None for a model that keeps none."""

    sink: Sink
    redundancy: Redundancy
    neighbours: Neighbours
    cache: CacheCandidates | None

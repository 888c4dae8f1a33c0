"""What the measures say, in numbers: sinks, redundant layers, candidate superblocks and the cache they would leave.

Everything here is a candidate that rests on a named measure; only a retrofit shows what it costs.
"""

from collections.abc import Sequence

import numpy as np

from crosslayer.core.method import Method
from crosslayer.core.methods import method_class, method_names
from crosslayer.output.record import Measure
from crosslayer.probe.shapes import LayerShape
from crosslayer.verbs.diagnose.groups import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.verbs.diagnose.record import (
    AttentionRemoved,
    CacheCandidates,
    KeptShare,
    Measures,
    Neighbours,
    RankedLayer,
    Redundancy,
    Sink,
    Superblocks,
    Verdict,
)

SINK_SHARE = 0.3  # of all attention, from which a layer is said to sink
PEAK = 100.0  # hidden norm of token 0 over the median, from which it is a massive activation
DRAIN = 0.5  # value norm of token 0 over the median, below which it is a drain

Shapes = Sequence[LayerShape | None]


def verdict(measures: Measures, shapes: Shapes, length: int) -> Verdict:
    """Return what the measures of sequences of `length` tokens say of layers of these shapes."""
    sink = sink_of(measures, shapes, length)
    redundancy = Redundancy(
        attention=_ranked(measures.attention_io_similarity), layers=_ranked(measures.layer_io_similarity)
    )
    neighbours = Neighbours(
        map_similarity=top_half_mean(measures.map_similarity),
        map_similarity_without_first=top_half_mean(measures.map_similarity_without_first),
    )
    keeps_cache = all(shape is None or shape.causal for shape in shapes)
    cache = _cache(measures, redundancy, shapes, length) if keeps_cache else None
    return Verdict(sink=sink, redundancy=redundancy, neighbours=neighbours, cache=cache)


def sink_of(measures: Measures, shapes: Shapes, length: int) -> Sink:
    """Return which layers attend to the first token more than to others, and what its states look like."""
    share = measures.first_token_share.array  # (L,), as the two below
    hidden = measures.hidden_norm_ratio.array
    value = measures.value_norm_ratio.array
    even = np.array([np.nan if shape is None else shape.even_share(length) for shape in shapes])
    sinks = (share > SINK_SHARE) & (share > 2 * even)  # in short texts an even share is large
    layers = np.flatnonzero(sinks).tolist()
    strongest = int(np.nanargmax(share))
    return Sink(
        layers=layers,
        begins=layers[0] if layers else None,
        strongest=strongest,
        strongest_share=float(share[strongest]),
        over_even=float(share[strongest] / even[strongest]),
        peaks=np.flatnonzero(hidden > PEAK).tolist(),
        drains=np.flatnonzero(value < DRAIN).tolist(),
    )


def top_half_mean(similarity: Measure) -> float | None:
    """Return the mean similarity of consecutive attention layers in the top half, None without such a pair."""
    matrix = similarity.array  # (L, L)
    layers = np.flatnonzero(~np.isnan(matrix.diagonal()))
    pairs = [
        matrix[above, below] for below, above in zip(layers, layers[1:], strict=False) if below >= len(matrix) // 2
    ]
    known = [cosine for cosine in pairs if not np.isnan(cosine)]
    return float(np.mean(known)) if known else None


def sharing_methods() -> list[type[Method]]:
    """Return the package's methods whose groups of layers keep less in the cache."""
    classes = [method_class(name) for name in method_names()]
    return [cls for cls in classes if cls.saves and cls.grouped]


def _ranked(similarity: Measure) -> list[RankedLayer]:
    known = [(layer, cosine) for layer, cosine in enumerate(similarity.mean) if cosine is not None]
    known.sort(key=lambda pair: -pair[1])
    return [RankedLayer(layer=layer, similarity=cosine) for layer, cosine in known]


def _cache(measures: Measures, redundancy: Redundancy, shapes: Shapes, length: int) -> CacheCandidates:
    """Return the candidates for sharing, and for attention to go without, with what each would leave of the cache."""
    count = len(shapes) // 2 // PAPER_SIZE * (PAPER_SIZE - 1)  # the paper's followers, whatever the masks allow
    similarity = measures.map_similarity_without_first.array
    least = sorted(entry.layer for entry in redundancy.attention[:count])
    stored = [{"keys": 0, "values": 0} for _ in shapes]  # elements of each layer
    for layer, shape in enumerate(shapes):
        if shape is not None:
            stored[layer] = dict(zip(("keys", "values"), shape.cached(length), strict=True))
    total = sum(sum(states.values()) for states in stored)

    def share_without(layers: list[int], states: Sequence[str]) -> float:
        """Return the share of all elements that stays if `layers` keep none of these states."""
        return 1 - sum(stored[layer][state] for layer in layers for state in states) / total

    def superblocks(groups: Groups) -> Superblocks:
        """Return groups with what each sharing method would leave of the cache."""
        followers = [layer for group in groups for layer in group[1:]]
        kept = [
            KeptShare(method=cls.name(), title=cls.__name__, share=share_without(followers, cls.saves))
            for cls in sharing_methods()
        ]
        return Superblocks(groups=groups, followers=len(followers), kept=kept)

    return CacheCandidates(
        length=length,
        elements=total,
        by_depth=superblocks(paper_groups(list(shapes))),
        by_similarity=superblocks(similar_groups(similarity, list(shapes), count)),
        resting_on="map_similarity_without_first",
        attention_removed=AttentionRemoved(layers=least, share=share_without(least, ("keys", "values"))),
    )

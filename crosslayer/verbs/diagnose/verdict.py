"""What the measures say, in numbers and in sentences: sinks, redundant layers, and the cache that would be left.

Everything here is a candidate that rests on a named measure; only a retrofit shows what it costs.
"""

from collections.abc import Sequence

import numpy as np

from crosslayer.core.method import Method
from crosslayer.core.methods import method_class, method_names
from crosslayer.output.record import Measure
from crosslayer.output.words import ranges
from crosslayer.probe.shapes import ENTRIES, LayerShape
from crosslayer.verbs.diagnose.groups import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.verbs.diagnose.result import (
    CacheCandidates,
    DiagnosedModel,
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
SHOWN = 4  # layers of a ranking


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
    count = len(shapes) // 2 // PAPER_SIZE * (PAPER_SIZE - 1)  # the paper's readers, whatever the masks allow
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
        readers = [layer for group in groups for layer in group[1:]]
        kept = [
            KeptShare(method=cls.name(), title=cls.__name__, share=share_without(readers, cls.saves))
            for cls in sharing_methods()
        ]
        return Superblocks(groups=groups, kept=kept)

    return CacheCandidates(
        length=length,
        elements=total,
        by_depth=superblocks(paper_groups(list(shapes))),
        by_similarity=superblocks(similar_groups(similarity, list(shapes), count)),
        least_attention=least,
        share_without=share_without(least, ("keys", "values")),
    )


def words(verdict: Verdict) -> list[str]:
    """Return the sentences, what is most striking first."""
    sentences, neighbours = _sink_words(verdict.sink), verdict.neighbours
    least = verdict.redundancy.attention[:SHOWN]
    if least:
        named = ", ".join(f"{entry.layer} ({entry.similarity:.3f})" for entry in least)
        sentences.append(f"Attention changes its input least in layers {named}, by cos(x, x + Attn(x)).")
    if verdict.cache is None:
        return [*sentences, "The model is bidirectional and keeps no KV cache, so no cache can be saved."]
    whole, rest = neighbours.map_similarity, neighbours.map_similarity_without_first
    if whole is not None and rest is not None:
        sentences.append(
            f"Neighbouring maps in the top half have a mean cosine of {whole:.2f}, and of {rest:.2f} without the first "
            "column."
        )
    return sentences + _cache_words(verdict.cache)


def notes(model: DiagnosedModel) -> list[str]:
    """Return what must be known of a model whose residual or attention is not the usual one."""
    sentences = []
    if model.streams > 1:
        sentences.append(
            f"The model carries {model.streams} residual streams: measures of hidden states are those of their mean, "
            "and beside it of each stream."
        )
    if model.over_depth:
        sentences.append(
            "Sublayers read earlier ones by attention over depth: a layer's hidden states are what its first sublayer "
            "reads, and they leave it as what the next layer reads."
        )
    layers = [layer for layer, mask in enumerate(model.masks) if mask is not None and ENTRIES in mask]
    if layers:
        sentences.append(
            f"Layers {ranges(layers)} also attend to keys that are not their tokens' own (compressed entries, another "
            "layer's): their maps show what the tokens themselves receive."
        )
    return sentences


def _sink_words(sink: Sink) -> list[str]:
    most = f"the most is {sink.strongest_share:.1%}, in layer {sink.strongest} ({sink.over_even:.1f} × even attention)"
    if sink.layers:
        layers = ranges(sink.layers)
        sentences = [
            f"The first token is a sink in layers {layers}: it takes over {SINK_SHARE:.0%} of attention; {most}."
        ]
    else:
        sentences = [f"No layer gives the first token more than {SINK_SHARE:.0%} of its attention; {most}."]
    if sink.peaks:
        writer = sink.peaks[0] - 1
        origin = f"layer {writer} writes it" if writer >= 0 else "it is there from the embedding"
        sentences.append(
            f"Its hidden state has a norm above {PEAK:.0f} × the median of the others in the input of layers "
            f"{ranges(sink.peaks)}; {origin}."
        )
    if sink.drains:
        sentences.append(f"Its value states have a norm below {DRAIN} × the median in layers {ranges(sink.drains)}.")
    return sentences


def _cache_words(cache: CacheCandidates) -> list[str]:
    sentences = []
    if cache.by_depth.groups:
        blocks, kept = _shown(cache.by_depth)
        sentences.append(f"Superblocks of 4 layers in the top half (arXiv 2502.00439), {blocks}, would keep {kept}.")
    if cache.by_similarity.groups:
        blocks, kept = _shown(cache.by_similarity)
        count = sum(len(group) - 1 for group in cache.by_similarity.groups)
        sentences.append(
            f"Superblocks by map similarity without the first column, {blocks} with {count} "
            f"reader{'s' if count > 1 else ''}, would keep {kept}."
        )
    if not sentences:
        sentences.append("No neighbouring layers may share maps: there are too few of them, or their masks differ.")
    if cache.least_attention:
        sentences.append(
            f"Dropping attention where it changes its input least, in layers {ranges(cache.least_attention)}, would "
            f"keep {cache.share_without:.2%} of the KV cache."
        )
    return sentences


def _shown(superblocks: Superblocks) -> tuple[str, str]:
    """Return the blocks, and what each method would leave of the cache."""
    kept = " or ".join(f"{entry.share:.2%} ({entry.title})" for entry in superblocks.kept)
    return " ".join(f"[{ranges(group)}]" for group in superblocks.groups), f"{kept} of the KV cache"

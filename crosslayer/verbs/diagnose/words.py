"""The verdict in sentences."""

from collections.abc import Sequence

from crosslayer.output.words import ranges
from crosslayer.probe.shapes import ENTRIES
from crosslayer.verbs.diagnose.record import (
    CacheCandidates,
    KeptShare,
    ModelFacts,
    Neighbours,
    Redundancy,
    Sink,
    Superblocks,
    Verdict,
)
from crosslayer.verbs.diagnose.verdict import PEAK, SINK_SHARE

GAP = 0.05  # between the two similarities, from which the first column is said to matter
SHOWN = 4  # layers of a ranking


def words(verdict: Verdict) -> list[str]:
    """Return the sentences, what is most striking first."""
    sentences = _sink_words(verdict.sink) + _redundancy_words(verdict.redundancy)
    if verdict.cache is None:
        return [*sentences, "The model is bidirectional and keeps no KV cache, so no cache can be saved."]
    return sentences + _neighbour_words(verdict.neighbours) + _cache_words(verdict.cache)


def notes(model: ModelFacts) -> list[str]:
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


def in_words(kept: Sequence[KeptShare]) -> str:
    """Return what each method would leave: 70.00% with A, 75.00% with B and 85.00% with C."""
    parts = [f"{entry.share:.2%} with {entry.title}" for entry in kept]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _sink_words(sink: Sink) -> list[str]:
    if sink.layers:
        sentences = [
            f"The first token is a sink: it takes more than {SINK_SHARE:.0%} of all attention in layers "
            f"{ranges(sink.layers)}, beginning at layer {sink.begins}; the most is {sink.strongest_share:.0%}, "
            f"in layer {sink.strongest}."
        ]
    else:
        sentences = [
            f"No layer gives the first token more than {SINK_SHARE:.0%} of its attention; the most is "
            f"{sink.strongest_share:.1%}, in layer {sink.strongest} ({sink.over_even:.1f} × even attention)."
        ]
    if sink.peaks:
        writer = sink.peaks[0] - 1
        origin = f"layer {writer} writes it" if writer >= 0 else "it is there from the embedding"
        sentences.append(
            f"Its hidden state towers over the others (norm above {PEAK:.0f} × their median) in the input of layers "
            f"{ranges(sink.peaks)}; {origin}."
        )
    if sink.drains:
        sentences.append(f"Its value states are drained (norm below half the median) in layers {ranges(sink.drains)}.")
    return sentences


def _redundancy_words(redundancy: Redundancy) -> list[str]:
    if not redundancy.attention:
        return []
    named = ", ".join(f"{entry.layer} ({entry.similarity:.3f})" for entry in redundancy.attention[:SHOWN])
    return [f"Attention changes its input least, by cos(x, x + Attn(x)), in layers {named}: candidates for removal."]


def _neighbour_words(neighbours: Neighbours) -> list[str]:
    whole, rest = neighbours.map_similarity, neighbours.map_similarity_without_first
    if whole is None or rest is None:
        return []
    link = "but" if rest < whole - GAP else "and"
    return [
        f"Neighbouring maps in the top half have a cosine of {whole:.2f}, {link} {rest:.2f} without the first column."
    ]


def _cache_words(cache: CacheCandidates) -> list[str]:
    sentences = []
    if cache.by_depth.groups:
        sentences.append(
            "The rule of arXiv 2502.00439 (blocks of 4 in the top half) gives the candidate superblocks "
            f"{_listed(cache.by_depth)}: the KV cache would shrink to {in_words(cache.by_depth.kept)}."
        )
    if cache.by_similarity.groups:
        sentences.append(_similar_words(cache))
    if not cache.by_depth.groups and not cache.by_similarity.groups:
        sentences.append("No neighbouring layers may share maps: there are too few of them, or their masks differ.")
    removed = cache.attention_removed
    if removed.layers:
        sentences.append(
            f"Dropping attention where it changes its input least, in layers {ranges(removed.layers)}, would keep "
            f"{removed.share:.2%} of the KV cache."
        )
    return sentences


def _similar_words(cache: CacheCandidates) -> str:
    """Say what the maps give; the same saving as by depth is by construction, the same blocks are not."""
    by_depth, similar = cache.by_depth, cache.by_similarity
    rule = "Map similarity without the first column"
    if similar.followers != by_depth.followers or similar.kept != by_depth.kept:
        return (
            f"{rule} gives the candidate superblocks {_listed(similar)}: the KV cache would shrink to "
            f"{in_words(similar.kept)}."
        )
    asked = f"{rule}, asked for as many followers ({similar.followers}) and so for the same shares,"
    if similar.groups == by_depth.groups:
        return f"{asked} gives the same superblocks: what depth alone says, the maps say too."
    return f"{asked} gives the candidate superblocks {_listed(similar)}."


def _listed(superblocks: Superblocks) -> str:
    return " ".join(f"[{ranges(group)}]" for group in superblocks.groups)

"""What the measures mean, in numbers and in sentences: sinks, redundant layers, and how much KV cache they would save.

The layers named here are candidates, each chosen by a measure; only a retrofit shows what changing them costs.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from crosslayer.core.methods import method_class, method_names
from crosslayer.output.formatting import Table, counted, named_layers, ranges
from crosslayer.output.record import Measure
from crosslayer.probe.shapes import ENTRIES, PAPER_SIZE, CacheShare, LayerShape, paper_groups, similar_groups
from crosslayer.verbs.diagnose.curves import known
from crosslayer.verbs.diagnose.result import (
    CacheCandidates,
    DiagnosedModel,
    KeptShare,
    Massive,
    Measures,
    Neighbors,
    RankedLayer,
    Redundancy,
    Sink,
    Statistics,
    Superblocks,
    Verdict,
)

# Of a layer's attention: more on the first token makes it an attention sink. The threshold of a head's sink rate (Gu et
# al. 2024), here of the mean over heads.
SINK_SHARE = 0.3
# A massive activation is a value above 100, and above 1,000 times the median magnitude of the layer's hidden states
# (Sun et al. 2024). Norms miss it: a channel of Gemma 3's first token has 8,400 times the median, its norm 12 times.
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
# Value norm of token 0 over the median: below this it is a value drain.
DRAIN = 0.5

Shapes = Sequence[LayerShape | None]
# (channel, value, magnitude over the median) of the largest channels, by layer
Activations = Sequence[Sequence[tuple[int, float, float]]]
SHOWN = 4  # layers of a ranking that a sentence names


def verdict(measures: Measures, shapes: Shapes, length: int, activations: Activations, others: Activations) -> Verdict:
    """Return the verdict on layers of these shapes, measured on sequences of `length` tokens.

    `activations` are the largest channels of token 0's hidden states, and `others` those of the other tokens, by layer.
    """
    share = measures.first_token_share.array()  # (L,), as the two below
    value = measures.value_norm_ratio.array()
    even = np.array([np.nan if shape is None else shape.even_share(length) for shape in shapes])
    # twice an even share, since this is itself above `SINK_SHARE` in texts of fewer than about ten tokens
    sinks = (share > SINK_SHARE) & (share > 2 * even)
    strongest = int(np.nanargmax(share))
    sink = Sink(
        layers=np.flatnonzero(sinks).tolist(),
        strongest=strongest,
        strongest_share=float(share[strongest]),
        over_even=float(share[strongest] / even[strongest]),
        drains=np.flatnonzero(value < DRAIN).tolist(),
    )

    redundancy = Redundancy(
        attention=_ranked(measures.attention_io_similarity), layers=_ranked(measures.layer_io_similarity)
    )
    upper_half: dict[str, float | None] = {}  # the mean similarity there, None without a pair of layers
    for name in ("map_similarity", "map_similarity_without_first"):
        upper = [cosine for layer, cosine in _neighbors(getattr(measures, name)) if layer >= len(shapes) // 2]
        upper_half[name] = float(np.mean(upper)) if upper else None
    neighbors = Neighbors(
        **upper_half,
        statistics=map_statistics(measures.map_similarity),
        statistics_without_first=map_statistics(measures.map_similarity_without_first),
    )
    keeps_cache = all(shape is None or shape.causal for shape in shapes)
    cache = _cache(measures, redundancy, shapes, length) if keeps_cache else None
    return Verdict(
        sink=sink,
        redundancy=redundancy,
        neighbors=neighbors,
        cache=cache,
        massive=massive(activations),
        massive_others=massive(others),
    )


def massive(activations: Activations) -> Massive | None:
    """Return which of each layer's largest channels are massive activations; None if no channel is."""
    layers: list[int] = []
    channels: Counter[int] = Counter()
    strongest, value = 0.0, 0.0
    for layer, largest in enumerate(activations):
        for channel, height, ratio in largest:
            if abs(height) > MASSIVE and ratio > MASSIVE_RATIO:
                layers.append(layer)
                channels[channel] += 1
                strongest, value = max(strongest, ratio), max(value, height, key=abs)
    if not layers:
        return None
    ordered = [channel for channel, _ in channels.most_common()]
    return Massive(layers=sorted(set(layers)), channels=ordered, value=value, ratio=strongest)


def map_statistics(similarity: Measure) -> Statistics | None:
    """Return statistics of the map similarity of neighboring layers; None if the model has no neighboring layers."""
    pairs, half = _neighbors(similarity), len(similarity.mean) // 2
    if not pairs:
        return None
    cosines = [cosine for _, cosine in pairs]
    upper = [cosine for layer, cosine in pairs if layer >= half]
    lower = [cosine for layer, cosine in pairs if layer < half]
    return Statistics(
        mean=float(np.mean(cosines)),
        top_less_bottom=float(np.mean(upper) - np.mean(lower)) if upper and lower else None,
        largest=max(cosines),
        smallest=min(cosines),
        deviation=float(np.std(cosines)),
    )


def _neighbors(similarity: Measure) -> list[tuple[int, float]]:
    """Return the lower layer and the similarity of each pair of neighboring attention layers."""
    matrix = similarity.array()  # (L, L)
    layers = np.flatnonzero(~np.isnan(matrix.diagonal()))
    pairs = [(int(below), float(matrix[above, below])) for below, above in zip(layers, layers[1:], strict=False)]
    return [(layer, cosine) for layer, cosine in pairs if not np.isnan(cosine)]


def _ranked(similarity: Measure) -> list[RankedLayer]:
    ranked = sorted(known(similarity).items(), key=lambda pair: -pair[1])
    return [RankedLayer(layer=layer, similarity=cosine) for layer, cosine in ranked]


def _cache(measures: Measures, redundancy: Redundancy, shapes: Shapes, length: int) -> CacheCandidates:
    """Return the candidates for sharing and for dropping attention, with what each keeps of the cache."""
    # as many readers as the paper has, whatever the masks
    count = len(shapes) // 2 // PAPER_SIZE * (PAPER_SIZE - 1)
    similarity = measures.map_similarity_without_first.array()
    least = sorted(entry.layer for entry in redundancy.attention[:count])
    cache = CacheShare(shapes, length, allocated=False)
    # the methods that shrink the cache by sharing within groups of layers
    classes = [method_class(name) for name in method_names()]
    sharing = [cls for cls in classes if cls.saves and cls.grouped]
    superblocks = []
    for groups in (paper_groups(list(shapes)), similar_groups(similarity, list(shapes), count)):
        # the first layer of a group keeps its states, the others read them
        readers = [layer for group in groups for layer in group[1:]]
        kept = [
            KeptShare(method=cls.name(), title=cls.title(), share=cache.without(readers, cls.saves)) for cls in sharing
        ]
        superblocks.append(Superblocks(groups=groups, kept=kept))
    by_depth, by_similarity = superblocks
    return CacheCandidates(
        length=length,
        elements=cache.total,
        by_depth=by_depth,
        by_similarity=by_similarity,
        least_attention=least,
        share_without=cache.without(least),
    )


def verdict_sentences(verdict: Verdict) -> list[str]:
    """Return the verdict in two sentences: the sink, and how much cache the redundant layers hold."""
    sink, cache = verdict.sink, verdict.cache
    where = f"is an attention sink in {named_layers(sink.layers)}" if sink.layers else "is not an attention sink"
    peak = f"at most {sink.strongest_share:.1%} of attention, in layer {sink.strongest}"
    first = f"The first token {where} ({peak}: {sink.over_even:.1f}× an even share)."
    if cache is None:
        return [first, "The model is bidirectional: it has no KV cache to reduce."]
    if not cache.least_attention:
        return [first]
    layers = counted(len(cache.least_attention), "layer")
    kept = f"would keep {100 * cache.share_without:.3g}% of the KV cache"
    return [first, f"Dropping the {layers} whose attention changes the input least {kept}; measure the loss first."]


def findings(verdict: Verdict) -> Table:
    """Return the table of findings: what, in which layers, and how strongly."""
    sink, cache, least = verdict.sink, verdict.cache, verdict.redundancy.attention[:SHOWN]
    whole, rest = verdict.neighbors.map_similarity, verdict.neighbors.map_similarity_without_first
    share = f"more than {SINK_SHARE:.0%} of attention; at most {sink.strongest_share:.1%} (layer {sink.strongest})"
    rows = [["attention sink at the first token", ranges(sink.layers) or "none", share]]
    for whose, peak in (("the first token", verdict.massive), ("other tokens", verdict.massive_others)):
        if peak is not None:
            origin = f"layer {peak.layers[0] - 1} writes it" if peak.layers[0] else "the embedding has it"
            named = f"channel{'s' * (len(peak.channels) > 1)} {', '.join(map(str, peak.channels[:SHOWN]))}"
            size = f"at most {peak.value:,.0f}, {peak.ratio:,.0f}× the median magnitude"
            rows.append([f"massive activation of {whose}", ranges(peak.layers), f"{named}: {size}; {origin}"])
    if sink.drains:
        rows.append(
            ["value drain of the first token", ranges(sink.drains), f"norm of values below {DRAIN}× the median"]
        )
    if least:
        cosines = ", ".join(f"{entry.similarity:.3f}" for entry in least)
        names = ", ".join(str(entry.layer) for entry in least)
        rows.append(["attention that changes its input least", names, f"cos(x, x + Attn(x)) = {cosines}"])
    if whole is not None and rest is not None:
        text = f"mean cosine {whole:.2f}; {rest:.2f} without the first token"
        rows.append(["similar maps of neighboring layers", "upper half", text])
    if cache is not None:
        rules = {"by depth": cache.by_depth, "by similar maps": cache.by_similarity}
        for rule, blocks in rules.items():
            kept = ", ".join(f"{100 * entry.share:.3g}% with {entry.title}" for entry in blocks.kept)
            groups = " ".join(f"[{ranges(group)}]" for group in blocks.groups)
            rows.append(
                [f"layers that could share, {rule}", groups or "none", f"KV cache kept: {kept}" if groups else ""]
            )
        if cache.least_attention:
            kept = f"KV cache kept: {100 * cache.share_without:.3g}%"
            rows.append(["attention to leave out, by that cosine", ranges(cache.least_attention), kept])
    return "Findings", ["finding", "layers", "value"], rows


def notes(model: DiagnosedModel) -> list[str]:
    """Return what a reader must know about a model whose residual stream or attention is unusual."""
    lines = []
    if model.streams > 1:
        lines.append(
            f"The model has {model.streams} residual streams: hidden states are measured on their mean, and on each "
            "stream separately."
        )
    if model.over_depth:
        lines.append(
            "Sublayers read earlier ones by attention over depth: a layer's input is what its first sublayer reads, "
            "and its output is what the next layer reads."
        )
    layers = [layer for layer, mask in enumerate(model.masks) if mask is not None and ENTRIES in mask]
    if layers:
        subject, verb = named_layers(layers).capitalize(), "attend" if len(layers) > 1 else "attends"
        lines.append(
            f"{subject} also {verb} to keys that are not their tokens' own (compressed entries, or another layer's "
            "keys): the measures count only the attention that tokens receive."
        )
    return lines

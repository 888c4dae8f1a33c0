"""The verdict in sentences."""

from crosslayer.output.words import ranges
from crosslayer.probe.shapes import ENTRIES
from crosslayer.verbs.diagnose.record import CacheCandidates, DiagnosedModel, Sink, Superblocks, Verdict
from crosslayer.verbs.diagnose.verdict import DRAIN, PEAK, SINK_SHARE

SHOWN = 4  # layers of a ranking


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
        count = cache.by_similarity.followers
        sentences.append(
            f"Superblocks by map similarity without the first column, {blocks} with {count} "
            f"follower{'s' if count > 1 else ''}, would keep {kept}."
        )
    if not sentences:
        sentences.append("No neighbouring layers may share maps: there are too few of them, or their masks differ.")
    removed = cache.attention_removed
    if removed.layers:
        sentences.append(
            f"Dropping attention where it changes its input least, in layers {ranges(removed.layers)}, would keep "
            f"{removed.share:.2%} of the KV cache."
        )
    return sentences


def _shown(superblocks: Superblocks) -> tuple[str, str]:
    """Return the blocks, and what each method would leave of the cache."""
    kept = " or ".join(f"{entry.share:.2%} ({entry.title})" for entry in superblocks.kept)
    return " ".join(f"[{ranges(group)}]" for group in superblocks.groups), f"{kept} of the KV cache"

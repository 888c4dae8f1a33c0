"""The page of a diagnosis, from its record alone."""

import itertools
import math
from dataclasses import replace
from typing import Any

from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, QUIET, Heat, Line, Panel
from crosslayer.output.record import Measure
from crosslayer.output.words import measured_on
from crosslayer.verbs.diagnose.curves import (
    COSINE,
    LAYER,
    NORM,
    SHARE,
    curve,
    highest,
    lowest,
    numbers,
    position_panel,
)
from crosslayer.verbs.diagnose.result import Diagnosis, TopToken

FIRST, *OTHERS = COLORS  # the first color is the first token's on the whole page
EIGENVALUES = 64  # of a spectrum that are shown


def layout(record: Diagnosis) -> Page:
    """Return the parts of the page."""
    model, settings = record.model, record.settings
    text = measured_on(settings.sequences, settings.length, settings.text, settings.documents)
    carried = f" · {model.streams} residual streams" if model.streams > 1 else ""
    return Page(
        title=f"Diagnosis of {model.name}",
        subtitle=f"{model.class_}, {model.parameters / 1e6:.1f} M parameters, {model.layers} layers{carried} · {text}",
        cards=_cards(record),
        words=record.words,
        panels=panels(record),
        tables=_tables(record),
    )


def _cards(record: Diagnosis) -> list[tuple[str, str, str]]:
    verdict, sink = record.verdict, record.verdict.sink
    layer, peak = highest(record.measures.hidden_norm_ratio)
    note = f"of layer {sink.strongest}'s attention goes to the first token"
    cards = [
        ("Strongest sink", f"{sink.strongest_share:.0%}", note),
        ("Hidden-state peak", f"{peak:.3g}×", f"the median norm, entering layer {layer}"),
    ]
    whole, rest = verdict.neighbours.map_similarity, verdict.neighbours.map_similarity_without_first
    if whole is not None and rest is not None:
        note = "mean cosine in the top half, with and without the first column"
        cards.append(("Neighbouring maps", f"{whole:.2f} → {rest:.2f}", note))
    for least in verdict.redundancy.attention[:1]:
        note = f"cos(x, x + Attn(x)) = {least.similarity:.3f}"
        cards.append(("Redundant attention", f"layer {least.layer}", note))
    if verdict.cache is not None and verdict.cache.by_depth.groups and verdict.cache.by_depth.kept:
        kept = sorted(verdict.cache.by_depth.kept, key=lambda entry: entry.share)
        note = f"would stay with superblocks ({' · '.join(entry.title for entry in kept)}); unproven until retrofitted"
        cards.append(("Candidate KV cache", " · ".join(f"{entry.share:.0%}" for entry in kept), note))
    return cards


def _tables(record: Diagnosis) -> list[Table]:
    """Return the top tokens of each layer, and the facts of the model."""
    tokens = []
    for layer, entries in enumerate(record.top_tokens):
        if entries:
            tokens.append([str(layer), [f"{_visible(entry)} {entry.share:.1%}" for entry in entries]])
    facts = record.model.model_dump(by_alias=True, exclude_none=True)
    masks = [mask or "no attention" for mask in record.model.masks]
    facts["masks"] = ", ".join(f"{masks.count(mask)} × {mask}" for mask in dict.fromkeys(masks))
    title = "Top tokens by layer (share of all attention that their most important occurrences receive)"
    rows = [[name.replace("_", " "), str(fact)] for name, fact in facts.items()]
    return [(title, ["layer", "tokens"], tokens), ("Model", ["fact", "value"], rows)]


def _visible(entry: TopToken) -> str:
    """Show white space in a token, and where the token is the first of the sequence."""
    if entry.token == "first token":
        return entry.token
    text = entry.token.replace("\n", "\\n").replace(" ", "␣")
    return f"{text} (first)" if entry.first else text


def panels(record: Diagnosis) -> list[Panel]:
    """Return all figures of the page, in order."""
    figures = [*_sink_panels(record), *_map_panels(record), *_layer_panels(record), _spectrum(record)]
    for name, what in (("attention_io_similarity", "attention"), ("layer_io_similarity", "whole layers")):
        if getattr(record.by_stream, name, None) is not None:
            sentence = f"As above for {what}, in each residual stream and in their mean."
            lines = _with_streams(record, name, QUIET)
            figures.append(_by_layer(f"{name}_by_stream", f"Single streams: {what}", sentence, "cosine", lines))
    if record.depth_weights is not None:
        z = record.depth_weights.weights.mean
        heat = Heat(numbers(z[0]), numbers(z), z, "mean weight", SHARE)
        sentence = (
            "Mean weight of every source that a sublayer reads; the last row is the output. A bright diagonal is a "
            "sublayer that reads its predecessor; a bright first column keeps the embedding in use."
        )
        axes = ("source (0 = embedding)", "sublayer")
        figures.append(Panel("depth_weights", "Weights over depth", sentence, *axes, heat=heat, wide=True))
    if record.cross_layer is not None:
        cosines = record.cross_layer
        sentence = (
            "Cosine with attention over the keys and values of two layers (arXiv 2410.17897, Fig. 4): the higher, the "
            "better the value residual stands for it."
        )
        lines = [
            curve(cosines.current_previous, "½A(V + V_prev)"),
            curve(cosines.current_first, "½A(V + V_1)"),
            curve(cosines.identity_previous, "AV + V_prev"),
            curve(cosines.identity_first, "AV + V_1"),
        ]
        title, axis = "Short forms of cross-layer attention", "cosine, mean over tokens"
        figures.append(_by_layer("cross_layer", title, sentence, axis, lines))
    if record.position_table is not None:
        table = record.position_table
        named = ", ".join(f"{row} ({table.norms[row]:.2f})" for row in table.outliers[:4]) or "none"
        sentence = (
            f"Norm of each row of the learned table, median {table.median:.2f}. Rows above 1.5 times that: {named}."
        )
        line = Line("norm", numbers(table.norms), table.norms, color=QUIET)
        axes = ("position", "L2 norm of the row")
        figures.append(Panel("position_table", "Position table", sentence, *axes, [line], wide=True))
    return figures


def _by_layer(key: str, title: str, sentence: str, axis: str, lines: list[Line], **options: Any) -> Panel:
    """Return a figure of lines over layers, by default of cosines; lines without a point are left out, but for one."""
    drawn = [line for line in lines if any(height is not None for height in line.y)] or lines[:1]
    return Panel(key, title, sentence, LAYER, axis, drawn, **{"bounds": COSINE, **options})


def _sink_panels(record: Diagnosis) -> list[Panel]:
    """Return what attention goes to the first token, and what its states are like."""
    measures, bins, flat = record.measures, record.importance_by_position, math.sqrt(record.model.hidden_size)
    sentence = (
        "Attention that each position receives, against an even spread (0 = even, 1 = ten times as much), positions on "
        "a logarithmic axis. A bright left column is a sink at the first token; causal rows favour early ones anyway."
    )
    title, label = "Importance by position", "log₁₀ of a′ · T"
    positions = position_panel("importance_by_position", title, sentence, bins, bins.length, label, (-1.0, 2.0))
    layer, top = highest(measures.first_token_share)
    sentence = (
        f"The first token's share of all attention, at most {top:.1%} in layer {layer}, "
        f"{record.verdict.sink.over_even:.1f} times an even share; sink rate: heads that give it over 0.3 on average."
    )
    lines = [
        curve(measures.first_token_share, "first token's share a′₀", FIRST),
        curve(measures.sink_rate, "sink rate", OTHERS[0]),
    ]
    sink = _by_layer("first_token_share", "Attention on the first token", sentence, "share", lines, bounds=SHARE)
    layer, top = highest(measures.hidden_norm_ratio)
    ratio, scale = "norm, first ÷ median of the others", {"log_y": True, "bounds": NORM}
    sentence = (
        f"Norm of the first token's hidden state, entering each layer, over the median of the others: {top:.3g} at "
        f"layer {layer}. A jump marks the layer before it as the maker of the sink."
    )
    lines = _with_streams(record, "hidden_norm_ratio", FIRST)
    peak = _by_layer("hidden_norm_ratio", "Hidden-state peak", sentence, ratio, lines, **scale)
    layer, low = lowest(measures.value_norm_ratio)
    sentence = (
        f"The same of the first token's value states: {low:.2f} at layer {layer}. Where its share of attention is high "
        "and this is low, attention is parked where it does little."
    )
    lines = [curve(measures.value_norm_ratio, color=FIRST)]
    drain = _by_layer("value_norm_ratio", "Value drain", sentence, ratio, lines, **scale)
    sentence = (
        f"L1 over L2 norm of what the MLP adds: √C = {flat:.0f} for a flat vector, near 1 for a few huge channels. A "
        "fall for the first token marks the MLP that writes (or erases) its massive activation."
    )
    lines = [
        curve(measures.mlp_l1_l2, "first token", FIRST),
        curve(measures.mlp_l1_l2_others, "median of the others", QUIET),
    ]
    flatness = _by_layer("mlp_l1_l2", "Flatness of the MLP's output", sentence, "L1 / L2", lines, bounds=(1, flat))
    return [positions, sink, peak, drain, flatness]


def _with_streams(record: Diagnosis, name: str, color: str) -> list[Line]:
    """Return the line of the mean of the residual streams, and behind it that of each, where there are several."""
    mean = curve(getattr(record.measures, name), color=color)
    single: Measure | None = getattr(record.by_stream, name, None)
    if single is None:
        return [mean]
    streams, layers = list(zip(*single.mean, strict=True)), numbers(single.mean)  # (L, N) → (N, L)
    colors = itertools.cycle(OTHERS)
    lines = [Line(f"stream {n}", layers, column, color=next(colors)) for n, column in enumerate(streams)]
    return [*lines, replace(mean, name="mean of the streams")]


def _map_panels(record: Diagnosis) -> list[Panel]:
    """Return how similar the maps are, of all pairs of layers and of neighbours."""
    texts = (  # measure, name of its line, title, sentence
        (
            "map_similarity",
            "head-averaged",
            "Map similarity",
            "Cosine between the head-averaged softmax maps of every two layers. Bright blocks on the diagonal look "
            "like layers that could share a map: compare the next figure before you believe it.",
        ),
        (
            "map_similarity_without_first",
            "without first column",
            "Map similarity without the first column",
            "The same without a sink at the first token. Sinks at other early tokens are still in it.",
        ),
        (
            "map_similarity_per_head",
            "head by head",
            "Map similarity head by head",
            "Cosine of equally numbered heads, averaged over heads: a sharing layer reads single heads.",
        ),
    )
    heats, lines = [], []
    for (key, name, title, sentence), color in zip(texts, OTHERS, strict=False):
        cosines: Measure = getattr(record.measures, key)
        layers = numbers(cosines.mean)
        heat = Heat(layers, layers, cosines.mean, "cosine", SHARE, square=True)
        heats.append(Panel(key, title, sentence, LAYER, LAYER, heat=heat))
        below = [row[i] for i, row in enumerate(cosines.mean[1:])]  # beside the main diagonal
        band = None if cosines.ci95 is None else [row[i] for i, row in enumerate(cosines.ci95[1:])]
        low, high = (None, None) if not band else zip(*band, strict=True)
        lines.append(Line(name, layers[1:], below, low, high, color))
    neighbours, sentence = record.verdict.neighbours, "Cosine of each layer's map with that of the layer below."
    whole, rest = neighbours.map_similarity, neighbours.map_similarity_without_first
    if whole is not None and rest is not None:
        sentence += (
            f" In the top half the mean is {whole:.2f}, and {rest:.2f} without the first column: the gap is what a "
            "common sink adds to an apparent redundancy."
        )
    options: dict[str, Any] = {"wide": True, "bounds": SHARE, "y_range": (-0.04, 1.04)}
    adjacent = Panel("adjacent_map_similarity", "Neighbouring layers", sentence, LAYER, "cosine", lines, **options)
    return [*heats[:2], adjacent, heats[2]]


def _layer_panels(record: Diagnosis) -> list[Panel]:
    """Return what layers change, how attention is spread, and what the residual stream is like."""
    measures, even = record.measures, math.log(record.settings.length)
    sentence = (
        "How little a sublayer turns the stream. The attention with the highest cosine goes first in arXiv 2406.15786, "
        "whole layers in ShortGPT; values near 1 are candidates, and only a measured damage decides."
    )
    lines = [
        curve(measures.attention_io_similarity, "attention: cos(x, x + Attn(x))", OTHERS[0]),
        curve(measures.layer_io_similarity, "layer: cos(x, layer(x))", OTHERS[1]),
    ]
    changes = _by_layer("io_similarity", "What attention and whole layers change", sentence, "cosine", lines)
    layer, low = lowest(measures.entropy)
    sentence = (
        f"Entropy of token importance; {even:.2f} would be an even spread. The lowest is {low:.2f}, at layer {layer}."
    )
    lines = [curve(measures.entropy, color=QUIET)]
    entropy = _by_layer("entropy", "Concentration", sentence, "entropy (nats)", lines, bounds=(0, even))
    rows = measures.top_importance.mean
    ranks = [list(column) for column in zip(*rows, strict=True)]  # (10, L)
    heat = Heat(numbers(rows), [i + 1 for i in numbers(ranks)], ranks, "share of all attention, a′", SHARE)
    sentence = (
        "The i-th largest importance of a sequence, by layer. One bright row at the bottom: a single sink; several: "
        "attention is shared by a few tokens, wherever they stand."
    )
    top = Panel("top_importance", "TOP-i importance", sentence, LAYER, "rank i", heat=heat)
    layer, most = highest(measures.token_similarity)
    sentence = f"Mean cosine between different tokens' hidden states, at most {most:.2f}, entering layer {layer}."
    lines = _with_streams(record, "token_similarity", QUIET)
    smoothing = _by_layer("token_similarity", "Over-smoothing", sentence, "mean cosine", lines)
    sentence = (
        "Mean norm of the hidden states that enter each layer. Pre-norm models grow with depth, so that later layers "
        "weigh less; a first token with a huge norm lifts the mean as well."
    )
    title, lines = "Magnitude of the residual stream", _with_streams(record, "stream_norm", QUIET)
    norm = _by_layer("stream_norm", title, sentence, "mean L2 norm", lines, log_y=True, bounds=NORM)
    return [changes, entropy, top, smoothing, norm]


def _spectrum(record: Diagnosis) -> Panel:
    rows = record.measures.value_spectrum.mean
    z: list[list[float | None]] = []
    for row in rows:
        z.append([math.log10(max(v / row[0], 1e-6)) if v and row[0] else None for v in row[:EIGENVALUES]])
    heat = Heat([i + 1 for i in numbers(z[0])], numbers(z), z, "log₁₀ λₖ / λ₁", (-3.0, 0.0))
    sentence = (
        "Eigenvalues of the value covariance (all heads together) relative to the largest. Rows that darken early have "
        f"values of low rank. The record holds all {len(rows[0])}; shown are the first {len(z[0])}."
    )
    return Panel("value_spectrum", "Spectrum of the values", sentence, "eigenvalue k", LAYER, heat=heat, wide=True)

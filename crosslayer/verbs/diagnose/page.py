"""The page of a diagnosis, built from its record alone."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from crosslayer.output.formatting import UNKNOWN, ranges
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, QUIET, Heat, Line, Panel
from crosslayer.output.record import Measure
from crosslayer.verbs.diagnose.curves import (
    LAST_ROW,
    LAYER,
    NORM,
    SHARE,
    beside,
    by_layer,
    curve,
    facts_table,
    from_one,
    gate_panels,
    head_panel,
    highest,
    lowest,
    measured_on,
    numbers,
    panels_beside,
    position_panel,
)
from crosslayer.verbs.diagnose.depth_panels import depth_panels, output_panels, read_most
from crosslayer.verbs.diagnose.result import Diagnosis
from crosslayer.verbs.diagnose.verdict import MASSIVE, MASSIVE_RATIO, SINK_SHARE, findings, notes, verdict_sentences

FIRST, *OTHERS = COLORS  # on the whole page the first color is that of the first token
# Cosines near 1 differ in a figure only as distances from 1, on a logarithmic axis.
DISTANCE = "1 − cosine"
FROM_ONE: dict[str, Any] = {"log_y": True, "bounds": (0.0, 2.0)}
EIGENVALUES = 64  # shown of each spectrum


def layout(record: Diagnosis) -> Page:
    """Return the page; figures show the baseline too, where there is one."""
    model, baseline, figures = record.model, record.baseline, panels(record)
    text = measured_on(record.settings, record.measures.stream_norm.over)
    if baseline is not None:
        figures = panels_beside(figures, panels(baseline), (model.name, baseline.model.name))
    streams = f" · {model.streams} residual streams" if model.streams > 1 else ""

    sink, cache = record.verdict.sink, record.verdict.cache
    tops = [largest[0] for largest in record.top_activations]
    note = f"of attention in layer {sink.strongest} is on the first token"
    cards = [("Strongest sink", f"{sink.strongest_share:.0%}", note)]
    if tops:
        channel, _, ratio = max(tops, key=lambda top: top[2])
        note = f"the median magnitude, in channel {channel} of the first token"
        cards.append(("Largest activation", f"{ratio:,.0f}×", note))
    if cache is not None and cache.least_attention:
        note = f"kept without attention in {len(cache.least_attention)} layers; loss not measured"
        cards.append(("KV cache", f"{cache.share_without:.0%}", note))
    return Page(
        title=f"Diagnosis of {model.name}",
        subtitle=f"{model.class_}, {model.parameters / 1e6:.1f} M parameters, {model.layers} layers{streams} · {text}",
        cards=cards,
        panels=figures,
        tables=_tables(record),
    )


def sentences(record: Diagnosis) -> list[str]:
    """Return the verdict, then what is unusual about the model."""
    lines = [*verdict_sentences(record.verdict), *notes(record.model)]
    if record.output_gates is not None:
        layer, least = record.output_gates.most_closed
        lines.append(
            f"Heads have output gates, most closed in layer {layer} (mean {least:.2f}): maps are those before the gate."
        )
    if record.depth_unknown is not None and (record.model.streams > 1 or record.model.over_depth):
        lines.append(f"Weights over depth are not known where this holds: {record.depth_unknown}.")
    return lines


def tables(record: Diagnosis) -> list[Table]:
    """Return the findings, and the model next to its baseline, if it has one; a terminal shows them too."""
    title, head, rows = findings(record.verdict)
    others = [(top, layer) for layer, tops in enumerate(record.top_tokens) for top in tops if not top.first]
    if others:
        most, strongest = max(others, key=lambda other: other[0].share)
        layers = [layer for top, layer in others if top.token == most.token and top.share > SINK_SHARE]
        value = f"{most.token!r} gets at least {most.share:.1%} in layer {strongest}, over all its positions"
        rows.insert(1, ["most attention to another token", ranges(layers or [strongest]), value])
    if record.depth_weights is not None:
        rows += read_most(record.depth_weights)
    return [(title, head, rows), *([] if record.baseline is None else [beside(record, record.baseline)])]


def _tables(record: Diagnosis) -> list[Table]:
    """Return the tables of similar maps, of top tokens and channels by layer, and of facts about the model."""
    similar, neighbors = [], record.verdict.neighbors
    maps = {"whole": neighbors.statistics, "without the first token": neighbors.statistics_without_first}
    for name, statistics in maps.items():
        if statistics is not None:
            gap = UNKNOWN if statistics.top_less_bottom is None else f"{statistics.top_less_bottom:+.3f}"
            others = (f"{each:.3f}" for each in (statistics.largest, statistics.smallest, statistics.deviation))
            similar.append([name, f"{statistics.mean:.3f}", gap, *others])

    of_layers = []
    for layer, (entries, tops) in enumerate(zip(record.top_tokens, record.top_channels, strict=True)):
        tokens = []
        for entry in entries:
            text = entry.token
            # white space made visible; "first token" stands for the first position of sequences that begin differently
            if text != "first token":
                text = text.replace("\n", "\\n").replace(" ", "␣")
                text = f"{text} (first)" if entry.first else text
            tokens.append(f"{text} {entry.share:.1%}")
        channels = [f"{channel}: {value:.3g} (×{ratio:.3g})" for channel, value, ratio in tops]
        of_layers.append([str(layer), tokens, channels])

    facts = record.model.model_dump(by_alias=True, exclude_none=True, exclude={"over_depth"})
    masks = [mask or "no attention" for mask in record.model.masks]
    facts["masks"] = ", ".join(f"{masks.count(mask)} × {mask}" for mask in dict.fromkeys(masks))
    title = (
        "By layer: tokens that receive most attention; largest channels of the MLP's output at token 0 (× the median)"
    )
    head = ["maps", "mean", "upper minus lower half", "largest", "smallest", "standard deviation"]
    return [
        ("Similarity of neighboring layers' maps (cosine)", head, similar),
        (title, ["layer", "tokens", "channels"], of_layers),
        facts_table(facts),
    ]


def panels(record: Diagnosis) -> list[Panel]:
    """Return all figures of the page, in order."""
    figures = [
        *_position_panels(record),
        *_sink_panels(record),
        *_map_panels(record),
        *_layer_panels(record),
        *_spectrum(record),
    ]
    if record.prefix_share is not None:
        figures.append(head_panel("prefix_share", record.prefix_share, "the prefix", "position"))
    if record.output_gates is not None:
        figures += gate_panels(record.output_gates, record.measures.first_token_share)
    changes = {"attention_io_similarity": "What attention changes", "layer_io_similarity": "What whole layers change"}
    for name, title in changes.items():
        if getattr(record.by_stream, name, None) is not None:
            sentence = "1 − the cosine of input and output in each residual stream, and in their mean."
            lines = [from_one(line) for line in _with_streams(record, name, QUIET)]
            title = f"{title}, by residual stream"
            figures.append(by_layer(f"{name}_by_stream", title, sentence, DISTANCE, lines, **FROM_ONE))
    figures += [] if record.depth_weights is None else depth_panels(record.depth_weights)
    if record.cross_layer is not None:
        cosines = record.cross_layer
        sentence = (
            "Cosine of each approximation with attention over the keys and values of two layers (arXiv 2410.17897, "
            "Fig. 4). High values: a value residual approximates it well."
        )
        lines = [
            curve(cosines.current_previous, "½A(V + V_prev)"),
            curve(cosines.current_first, "½A(V + V_1)"),
            curve(cosines.identity_previous, "AV + V_prev"),
            curve(cosines.identity_first, "AV + V_1"),
        ]
        title, axis = "Approximations of cross-layer attention", "cosine, mean over tokens"
        figures.append(by_layer("cross_layer", title, sentence, axis, lines))
    figures += output_panels(record.outputs) if record.outputs else []
    if record.position_table is not None:
        table = record.position_table
        outliers = ", ".join(f"{row} ({table.norms[row]:.2f})" for row in table.outliers[:4]) or "none"
        sentence = (
            f"Norm of each row of the learned table (median {table.median:.2f}). Rows above 1.5× that: {outliers}."
        )
        line = Line("norm", numbers(table.norms), table.norms, color=QUIET)
        axes = ("position", "L2 norm of the row")
        figures.append(Panel("position_table", "Position table", sentence, *axes, [line], wide=True))
    return figures


def _position_panels(record: Diagnosis) -> list[Panel]:
    """Return attention, and the norms of values and hidden states, by layer and position (2410.17897, Fig. 19)."""
    bins = record.importance_by_position
    sentence = (
        "Attention that each position receives, relative to an even spread (0: even, 1: ten times as much), on a "
        "logarithmic axis. A bright left column is a sink at the first token; a causal mask alone favors early tokens "
        "too."
    )
    title, label = "Attention received, by position", "log₁₀ of a′ · T"
    positions = position_panel("importance_by_position", title, sentence, bins, bins.length, label, (-1.0, 2.0))
    last = position_panel("last_row", *LAST_ROW, record.last_row_by_position, 1.0, "log₁₀ of the share", (-4.0, 0.0))
    figures = [positions, last]
    for states, bins in (("value", record.value_norms_by_position), ("hidden", record.hidden_norms_by_position)):
        key, title = f"{states}_norms_by_position", f"Norm of the {states} states, by position"
        norms = [norm for row in bins.mean for norm in row if norm] or [1.0]
        limits = float(np.floor(np.log10(min(norms)))), float(np.ceil(np.log10(max(norms))))
        sentence = "L2 norm, on a logarithmic scale. A left column that differs from its row: the first token's states."
        figures.append(position_panel(key, title, sentence, bins, 1.0, "log₁₀ of the norm", limits))
    return figures


def _sink_panels(record: Diagnosis) -> list[Panel]:
    """Return the figures on attention to the first token, and on its hidden states and values."""
    measures, flat = record.measures, math.sqrt(record.model.hidden_size)
    layer, top = highest(measures.first_token_share)
    sentence = (
        f"The first token's share of all attention: at most {top:.1%}, in layer {layer} "
        f"({record.verdict.sink.over_even:.1f}× an even share). Sink rate: share of heads that give it more than 0.3."
    )
    lines = [
        curve(measures.first_token_share, "first token's share a′₀", FIRST),
        curve(measures.sink_rate, "sink rate", OTHERS[0]),
        curve(measures.first_contribution, "its share of attention × norm of values", OTHERS[1]),
    ]
    sink = by_layer("first_token_share", "Attention on the first token", sentence, "share", lines, bounds=SHARE)
    layer, top = highest(measures.hidden_norm_ratio)
    ratio, scale = "norm, first ÷ median of the others", {"log_y": True, "bounds": NORM}
    sentence = (
        f"Norm of the first token's hidden state at the input of each layer, over the median of the other tokens: at "
        f"most {top:.3g}×, in layer {layer}."
    )
    lines = _with_streams(record, "hidden_norm_ratio", FIRST)
    norms = by_layer("hidden_norm_ratio", "Norm of the first token's hidden state", sentence, ratio, lines, **scale)
    layer, low = lowest(measures.value_norm_ratio)
    sentence = (
        f"Norm of the first token's values over the median of the other tokens: at least {low:.2f}×, in layer {layer}. "
        "Where it is low and attention to the token is high, that attention adds little."
    )
    lines = [curve(measures.value_norm_ratio, "values", FIRST), curve(measures.key_norm_ratio, "keys", OTHERS[0])]
    drain = by_layer("value_norm_ratio", "Value drain", sentence, ratio, lines, **scale)
    sentence = (
        "Mean cosine of later queries with the first token's key, and with the other keys before them: scores are "
        "‖q‖ ‖k‖ cos θ, so a sink needs a large cosine or a large key."
    )
    lines = [
        curve(measures.query_key_cosine, "first token's key", FIRST),
        curve(measures.query_key_cosine_others, "keys between", QUIET),
    ]
    angle = by_layer("query_key_cosine", "Angle of queries and keys", sentence, "cosine", lines)
    sentence = (
        f"L1 over L2 norm of the MLP's output: √C = {flat:.0f} for a flat vector, near 1 for a few huge channels. A "
        "fall for the first token marks the MLP that writes (or erases) its massive activation."
    )
    lines = [
        curve(measures.mlp_l1_l2, "first token", FIRST),
        curve(measures.mlp_l1_l2_others, "median of the others", QUIET),
    ]
    flatness = by_layer("mlp_l1_l2", "Flatness of the MLP's output", sentence, "L1 / L2", lines, bounds=(1, flat))
    heads = head_panel("first_token_by_head", measures.first_token_by_head, "the first token")
    return [sink, heads, *_massive_panels(record), norms, drain, angle, flatness]


def _massive_panels(record: Diagnosis) -> list[Panel]:
    """Return the figure of the largest channel of hidden states; none for a record from before it was measured."""
    if not record.top_activations:
        return []
    lines = [
        Line(name, numbers(tops), [largest[0][2] for largest in tops], color=color)
        for name, tops, color in (
            ("first token", record.top_activations, FIRST),
            ("largest of the others", record.top_activations_others, OTHERS[0]),
        )
    ]
    sentence = (
        "Largest channel of the hidden states at the input of each layer, over the median magnitude of all. Above "
        f"{MASSIVE_RATIO:,.0f} (and a value above {MASSIVE:.0f}) it is a massive activation. The layer before a jump "
        "writes it."
    )
    axis = "largest channel ÷ median"
    return [by_layer("massive_activations", "Massive activations", sentence, axis, lines, log_y=True, bounds=NORM)]


def _with_streams(record: Diagnosis, name: str, color: str) -> list[Line]:
    """Return the line of a measure on the mean of the residual streams, and, if there are several, one for each."""
    mean = curve(getattr(record.measures, name), color=color)
    single: Measure | None = getattr(record.by_stream, name, None)
    if single is None:
        return [mean]
    streams, layers = list(zip(*single.mean, strict=True)), numbers(single.mean)  # (L, N) → (N, L)
    colors = itertools.cycle(OTHERS)
    lines = [Line(f"stream {n}", layers, column, color=next(colors)) for n, column in enumerate(streams)]
    return [*lines, replace(mean, name="mean of the streams")]


def _map_panels(record: Diagnosis) -> list[Panel]:
    """Return the figures on the similarity of attention maps, for all pairs of layers and for neighbors."""
    texts = (  # measure, name of its line, title, sentence
        (
            "map_similarity",
            "head-averaged",
            "Map similarity",
            "Cosine between the head-averaged attention maps of every two layers. Bright blocks on the diagonal "
            "suggest layers that could share a map, but a common sink produces them too: see the next figure.",
        ),
        (
            "map_similarity_without_first",
            "without the first token",
            "Map similarity without the first token",
            "The same without the maps' first column. Sinks at other early tokens still count.",
        ),
        (
            "map_similarity_per_head",
            "head by head",
            "Map similarity head by head",
            "Cosine between the maps of heads with the same index, averaged over heads: sharing happens head by head.",
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
    neighbors, sentence = record.verdict.neighbors, "1 − the cosine of each layer's map with the previous layer's."
    whole, rest = neighbors.map_similarity, neighbors.map_similarity_without_first
    if whole is not None and rest is not None:
        sentence += (
            f" The mean cosine over the upper half is {whole:.2f}, and {rest:.2f} without the first token. A "
            "sink that all layers share makes the first larger."
        )
    drawn, options = [from_one(line) for line in lines], FROM_ONE | {"bounds": SHARE, "wide": True}
    adjacent = Panel("adjacent_map_similarity", "Neighboring layers", sentence, LAYER, DISTANCE, drawn, **options)
    return [*heats[:2], adjacent, heats[2]]


def _layer_panels(record: Diagnosis) -> list[Panel]:
    """Return the figures on what layers change, how attention is spread, and the residual stream."""
    measures, even = record.measures, math.log(record.settings.length)
    sentence = (
        "1 − the cosine of input and output: near 0, a sublayer changes little. arXiv 2406.15786 removes the attention "
        "with the highest cosine first, ShortGPT whole layers. These are candidates; only a measured loss decides."
    )
    lines = [
        curve(measures.attention_io_similarity, "attention: 1 − cos(x, x + Attn(x))", OTHERS[0]),
        curve(measures.layer_io_similarity, "layer: 1 − cos(x, layer(x))", OTHERS[1]),
    ]
    drawn, title = [from_one(line) for line in lines], "What attention and whole layers change"
    changes = by_layer("io_similarity", title, sentence, DISTANCE, drawn, **FROM_ONE)
    layer, low = lowest(measures.entropy)
    sentence = (
        f"Entropy of the attention that tokens receive ({even:.2f} if even): at least {low:.2f}, in layer {layer}."
    )
    lines = [curve(measures.entropy, color=QUIET)]
    entropy = by_layer("entropy", "Concentration of attention", sentence, "entropy (nats)", lines, bounds=(0, even))
    shares = measures.top_importance.mean
    ranks = [list(column) for column in zip(*shares, strict=True)]  # (10, L)
    heat = Heat(numbers(shares), [i + 1 for i in numbers(ranks)], ranks, "share of all attention, a′", SHARE)
    sentence = (
        "The i-th largest share of attention that a token of a sequence receives, by layer. One bright row at the "
        "bottom: a single sink. Several: a few tokens, at any position, receive most attention."
    )
    top = Panel("top_importance", "Largest shares of attention", sentence, LAYER, "rank i", heat=heat)
    layer, most = highest(measures.token_similarity)
    sentence = (
        f"Mean cosine between different tokens' hidden states: at most {most:.2f}, at the input of layer {layer}."
    )
    lines = _with_streams(record, "token_similarity", QUIET)
    smoothing = by_layer("token_similarity", "Over-smoothing", sentence, "mean cosine", lines)
    sentence = (
        "Mean norm of the hidden states at the input of each layer. In pre-norm models it grows with depth, so later "
        "layers count less; a first token with a huge norm raises the mean too."
    )
    title, lines = "Norm of the residual stream", _with_streams(record, "stream_norm", QUIET)
    norm = by_layer("stream_norm", title, sentence, "mean L2 norm", lines, log_y=True, bounds=NORM)
    return [changes, entropy, top, smoothing, norm]


def _spectrum(record: Diagnosis) -> list[Panel]:
    """Return the figures on the eigenvalues of the values: relative to the largest, and the largest itself."""
    spectra = record.measures.value_spectrum.mean  # (L, H_kv·D)
    z: list[list[float | None]] = []
    for row in spectra:
        # a floor below the scale of the colors, whose end is 1e-3
        z.append([math.log10(max(v / row[0], 1e-6)) if v and row[0] else None for v in row[:EIGENVALUES]])
    heat = Heat([i + 1 for i in numbers(z[0])], numbers(z), z, "log₁₀ λₖ / λ₁", (-3.0, 0.0))
    sentence = (
        "Eigenvalues of the covariance of the values (all heads together), relative to the largest. Rows that darken "
        f"early: values of low rank. The first {len(z[0])} of {len(spectra[0])} are shown."
    )
    heats = Panel("value_spectrum", "Spectrum of the values", sentence, "eigenvalue k", LAYER, heat=heat, wide=True)
    line = Line("", numbers(spectra), [row[0] for row in spectra], color=QUIET)
    sentence = "Largest eigenvalue of the second moment of the values, all heads together."
    scale = {"log_y": True, "bounds": NORM}
    return [heats, by_layer("largest_eigenvalue", "Size of the values", sentence, "eigenvalue", [line], **scale)]

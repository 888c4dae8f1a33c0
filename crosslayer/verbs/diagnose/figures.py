"""The figures of a diagnosis, from its record alone."""

import itertools
import math
from dataclasses import replace
from typing import Any

from crosslayer.output.panel import COLORS, QUIET, Heat, Line, Panel
from crosslayer.output.record import Measure
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
from crosslayer.verbs.diagnose.record import DepthWeights, PositionTable
from crosslayer.verbs.diagnose.result import Diagnosis

FIRST, *OTHERS = COLORS  # the first color is the first token's on the whole page
EIGENVALUES = 64  # of a spectrum that are shown


def panels(record: Diagnosis) -> list[Panel]:
    """Return all figures of the page, in order."""
    figures = [*_sink_panels(record), *_map_panels(record), *_layer_panels(record), _spectrum(record)]
    figures += _stream_panels(record)
    if record.depth_weights is not None:
        figures.append(_depth_weights(record.depth_weights))
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
        figures.append(_by_layer("cross_layer", title, sentence, axis, lines, bounds=COSINE))
    if record.position_table is not None:
        figures.append(_position_table(record.position_table))
    return figures


def _by_layer(key: str, title: str, sentence: str, axis: str, lines: list[Line], **options: Any) -> Panel:
    """Return a figure of lines over layers, those left out that have no point."""
    drawn = [line for line in lines if any(height is not None for height in line.y)]
    return Panel(key, title, sentence, LAYER, axis, drawn, **options)


def _sink_panels(record: Diagnosis) -> list[Panel]:
    """Return what attention goes to the first token, and what its states are like."""
    measures, bins, flat = record.measures, record.importance_by_position, math.sqrt(record.model.hidden_size)
    sentence = (
        "How much attention each position receives, against an even spread (0 = even, 1 = ten times as much), positions "
        "on a logarithmic axis. A bright column at the left is a sink at the first token; causal models give early "
        "positions more in any case, as more rows see them."
    )
    title, label = "Importance by position", "log₁₀ of a′ · T"
    positions = position_panel("importance_by_position", title, sentence, bins, bins.length, label, (-1.0, 2.0))
    layer, top = highest(measures.first_token_share)
    sentence = (
        f"The first token's share of all attention, at most {top:.1%} in layer {layer}: "
        f"{record.verdict.sink.over_even:.1f} times what even attention would give. The sink rate is the share of heads "
        "that give it more than 0.3 on average."
    )
    lines = [
        curve(measures.first_token_share, "first token's share a′₀", FIRST),
        curve(measures.sink_rate, "sink rate", OTHERS[0]),
    ]
    sink = _by_layer("first_token_share", "Attention on the first token", sentence, "share", lines, bounds=SHARE)
    layer, top = highest(measures.hidden_norm_ratio)
    ratio, scale = "norm, first ÷ median of the others", {"log_y": True, "bounds": NORM}
    sentence = (
        f"Norm of the first token's hidden state, entering each layer, over the median of the others: {top:.3g} at layer "
        f"{layer}. A jump marks the layer before it as the maker of the sink; 1 is unremarkable."
    )
    lines = _with_streams(record, "hidden_norm_ratio", FIRST)
    peak = _by_layer("hidden_norm_ratio", "Hidden-state peak", sentence, ratio, lines, **scale)
    layer, low = lowest(measures.value_norm_ratio)
    sentence = (
        f"Norm of the first token's value states over the median of the others: {low:.2f} at layer {layer}. Where the "
        "share of attention is high and this is low, attention is parked where it does little."
    )
    lines = [curve(measures.value_norm_ratio, color=FIRST)]
    drain = _by_layer("value_norm_ratio", "Value drain", sentence, ratio, lines, **scale)
    sentence = (
        f"L1 over L2 norm of what the MLP adds: √C = {flat:.0f} for a flat vector, near 1 for a few huge channels. A fall "
        "for the first token marks the MLP that writes (or erases) its massive activation."
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
    texts = {
        "map_similarity": (
            "Map similarity",
            "Cosine between the head-averaged softmax maps of every two layers. Bright blocks on the diagonal look like "
            "layers that could share a map: compare the next figure before you believe it.",
        ),
        "map_similarity_without_first": (
            "Map similarity without the first column",
            "The same with the first column set aside, and so without a sink at the first token. Sinks at other early "
            "tokens are still in it: a bright block need not be similarity of content.",
        ),
        "map_similarity_per_head": (
            "Map similarity head by head",
            "The cosine of equally numbered heads, averaged over heads: a sharing layer reads single heads, not their "
            "average.",
        ),
    }
    names = ("head-averaged", "without first column", "head by head")
    heats, lines = [], []
    for (key, (title, sentence)), name, color in zip(texts.items(), names, OTHERS, strict=False):
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
            f" In the top half the mean is {whole:.2f}, and {rest:.2f} without the first column. A gap between the two is "
            "what a common sink adds to an apparent redundancy."
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
    title = "What attention and whole layers change"
    changes = _by_layer("io_similarity", title, sentence, "cosine", lines, bounds=COSINE)
    layer, low = lowest(measures.entropy)
    sentence = (
        f"Entropy of token importance in nats; {even:.2f} would be an even spread. Lower is more concentrated: {low:.2f} "
        f"at layer {layer}."
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
    sentence = (
        "Mean cosine between different tokens' hidden states; high means over-smoothing. The most is "
        f"{most:.2f}, entering layer {layer}."
    )
    lines = _with_streams(record, "token_similarity", QUIET)
    smoothing = _by_layer("token_similarity", "Over-smoothing", sentence, "mean cosine", lines, bounds=COSINE)
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


def _stream_panels(record: Diagnosis) -> list[Panel]:
    """Return what attention and whole layers change in each residual stream, where there are several."""
    figures = []
    for name, what in (("attention_io_similarity", "attention"), ("layer_io_similarity", "whole layers")):
        if getattr(record.by_stream, name, None) is not None:
            title, sentence = (
                f"Single streams: {what}",
                f"As above for {what}, in each residual stream and in their mean.",
            )
            lines = _with_streams(record, name, QUIET)
            figures.append(_by_layer(f"{name}_by_stream", title, sentence, "cosine", lines, bounds=COSINE))
    return figures


def _depth_weights(depth: DepthWeights) -> Panel:
    z = depth.weights.mean
    heat = Heat(numbers(z[0]), numbers(z), z, "mean weight", SHARE)
    sentence = (
        "What each sublayer reads: the mean weight of every source that is there by then. Source 0 is the embedding, the "
        "last row is the output. A bright diagonal is a sublayer that reads its predecessor; a bright first column keeps "
        "the embedding in use."
    )
    title, axis = "Weights over depth", "source (0 = embedding)"
    return Panel("depth_weights", title, sentence, axis, "sublayer", heat=heat, wide=True)


def _position_table(table: PositionTable) -> Panel:
    named = ", ".join(f"{row} ({table.norms[row]:.2f})" for row in table.outliers[:4]) or "none"
    sentence = (
        f"Norm of each row of the learned position table; the median is {table.median:.2f}. Rows above 1.5 times that: "
        f"{named}."
    )
    lines = [Line("norm", numbers(table.norms), table.norms, color=QUIET)]
    return Panel("position_table", "Position table", sentence, "position", "L2 norm of the row", lines, wide=True)

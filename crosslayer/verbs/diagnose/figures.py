"""The figures of a diagnosis, from its record alone."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from crosslayer.output.panel import COLORS, QUIET, Heat, Line, Panel, by_position
from crosslayer.output.record import Measure
from crosslayer.verbs.diagnose.record import ByStream, CrossLayer, DepthWeights, PositionTable
from crosslayer.verbs.diagnose.result import Diagnosis

LAYER = "layer"
FIRST, *OTHERS = COLORS  # the first color is the first token's on the whole page
SHARE, COSINE = (0.0, 1.0), (-1.0, 1.0)  # what is possible


def panels(record: Diagnosis) -> list[Panel]:
    """Return all figures of the page, in order."""
    averaged, without_first, by_head = _similarities(record)
    figures = [
        _positions(record),
        _sink_share(record),
        _peaks(record),
        _drains(record.measures.value_norm_ratio),
        _flatness(record),
        averaged,
        without_first,
        _adjacent(record),
        by_head,
        _io(record),
        _concentration(record),
        _top(record),
        _smoothing(record),
        _stream(record),
        _spectrum(record),
    ]
    if record.by_stream is not None:
        figures += _io_of_streams(record, record.by_stream)
    if record.depth_weights is not None:
        figures.append(_depth_weights(record.depth_weights))
    if record.cross_layer is not None:
        figures.append(_cross_layer(record.cross_layer))
    if record.position_table is not None:
        figures.append(_position_table(record.position_table))
    return figures


def _by_layer(measure: Measure, name: str = "", color: str | None = None) -> Line:
    low, high = _band(measure.ci95)
    return Line(name, _numbers(measure.mean), measure.mean, low, high, color)


def _each(record: Diagnosis, name: str, mean: Line) -> list[Line]:
    """Return the line of the mean of the residual streams, and behind it that of each, where there are several."""
    single = None if record.by_stream is None else dict(record.by_stream)[name]
    if single is None:
        return [mean]
    columns = list(zip(*single.mean, strict=True))  # (L, N) → (N, L)
    layers, streams = _numbers(single.mean), zip(columns, itertools.cycle(OTHERS), strict=False)
    lines = [Line(f"stream {n}", layers, column, color=color) for n, (column, color) in enumerate(streams)]
    return [*lines, replace(mean, name="mean of the streams")]


def _band(ci95: list[list[float]] | None) -> tuple[list[float] | None, list[float] | None]:
    if ci95 is None:
        return None, None
    return [low for low, _ in ci95], [high for _, high in ci95]


def _known(measure: Measure) -> list[tuple[int, float]]:
    """Return layers with their means, where there are any."""
    return [(layer, mean) for layer, mean in enumerate(measure.mean) if mean is not None] or [(0, math.nan)]


def _lowest(measure: Measure) -> tuple[int, float]:
    """Return the layer with the lowest mean, and that mean; NaN where there is none."""
    return min(_known(measure), key=lambda pair: pair[1])


def highest(measure: Measure) -> tuple[int, float]:
    """Return the layer with the highest mean, and that mean; NaN where there is none."""
    return max(_known(measure), key=lambda pair: pair[1])


def _positions(record: Diagnosis) -> Panel:
    bins = record.importance_by_position
    z = []
    for row in bins.mean:
        z.append([None if share is None else math.log10(max(share * bins.length, 1e-3)) for share in row])
    drawn = by_position(bins.edges, bins.length, z, "log₁₀ of a′ · T", (-1.0, 2.0))
    sentence = (
        "How much attention each position receives, against an even spread (0 = even, 1 = ten times as much), positions "
        "on a logarithmic axis. A bright column at the left is a sink at the first token; causal models give early "
        "positions more in any case, as more rows see them."
    )
    title, axis = "Importance by position", "position (0 = first token)"
    return Panel("importance_by_position", title, sentence, axis, LAYER, wide=True, **drawn)


def _sink_share(record: Diagnosis) -> Panel:
    share, rate = record.measures.first_token_share, record.measures.sink_rate
    layer, top = highest(share)
    sentence = (
        f"The first token's share of all attention, at most {top:.1%} in layer {layer}: "
        f"{record.verdict.sink.over_even:.1f} times what even attention would give. The sink rate is the share of heads "
        "that give it more than 0.3 on average."
    )
    lines = [_by_layer(share, "first token's share a′₀", FIRST), _by_layer(rate, "sink rate", OTHERS[0])]
    return Panel("first_token_share", "Attention on the first token", sentence, LAYER, "share", lines, bounds=SHARE)


def _peaks(record: Diagnosis) -> Panel:
    ratio = record.measures.hidden_norm_ratio
    layer, top = highest(ratio)
    sentence = (
        f"Norm of the first token's hidden state, entering each layer, over the median of the others: {top:.3g} at layer "
        f"{layer}. A jump marks the layer before it as the maker of the sink; 1 is unremarkable."
    )
    lines = _each(record, "hidden_norm_ratio", _by_layer(ratio, color=FIRST))
    return _ratio("hidden_norm_ratio", "Hidden-state peak", sentence, lines)


def _drains(ratio: Measure) -> Panel:
    layer, low = _lowest(ratio)
    sentence = (
        f"Norm of the first token's value states over the median of the others: {low:.2f} at layer {layer}. Where the "
        "share of attention is high and this is low, attention is parked where it does little."
    )
    return _ratio("value_norm_ratio", "Value drain", sentence, [_by_layer(ratio, color=FIRST)])


def _ratio(key: str, title: str, sentence: str, lines: list[Line]) -> Panel:
    axis = "norm, first ÷ median of the others"
    return Panel(key, title, sentence, LAYER, axis, lines, log_y=True, bounds=(0, math.inf))


def _similarities(record: Diagnosis) -> list[Panel]:
    return [
        _similarity(
            "map_similarity",
            "Map similarity",
            "Cosine between the head-averaged softmax maps of every two layers. Bright blocks on the diagonal look like "
            "layers that could share a map: compare the next figure before you believe it.",
            record.measures.map_similarity,
        ),
        _similarity(
            "map_similarity_without_first",
            "Map similarity without the first column",
            "The same with the first column set aside, and so without a sink at the first token. Sinks at other early "
            "tokens are still in it: a bright block need not be similarity of content.",
            record.measures.map_similarity_without_first,
        ),
        _similarity(
            "map_similarity_per_head",
            "Map similarity head by head",
            "The cosine of equally numbered heads, averaged over heads: a sharing layer reads single heads, not their "
            "average.",
            record.measures.map_similarity_per_head,
        ),
    ]


def _similarity(key: str, title: str, sentence: str, cosines: Measure) -> Panel:
    layers = _numbers(cosines.mean)
    heat = Heat(layers, layers, cosines.mean, "cosine", SHARE, square=True)
    return Panel(key, title, sentence, LAYER, LAYER, heat=heat)


def _adjacent(record: Diagnosis) -> Panel:
    lines = [
        _of_neighbours(record.measures.map_similarity, "head-averaged", OTHERS[0]),
        _of_neighbours(record.measures.map_similarity_without_first, "without first column", OTHERS[1]),
        _of_neighbours(record.measures.map_similarity_per_head, "head by head", OTHERS[2]),
    ]
    neighbours = record.verdict.neighbours
    whole, rest = neighbours.map_similarity, neighbours.map_similarity_without_first
    sentence = "Cosine of each layer's map with that of the layer below."
    if whole is not None and rest is not None:
        sentence += (
            f" In the top half the mean is {whole:.2f}, and {rest:.2f} without the first column. A gap between the two is "
            "what a common sink adds to an apparent redundancy."
        )
    ends = (-0.04, 1.04)  # as in the maps of it
    title, key = "Neighbouring layers", "adjacent_map_similarity"
    return Panel(key, title, sentence, LAYER, "cosine", lines, wide=True, bounds=SHARE, y_range=ends)


def _of_neighbours(cosines: Measure, name: str, color: str) -> Line:
    """Return the cosine of each layer with the layer below, the diagonal beside the main diagonal."""
    upper = range(1, len(cosines.mean))
    low, high = _band(None if cosines.ci95 is None else [cosines.ci95[i][i - 1] for i in upper])
    return Line(name, [float(i) for i in upper], [cosines.mean[i][i - 1] for i in upper], low, high, color)


def _depth_weights(depth: DepthWeights) -> Panel:
    z = depth.weights.mean
    heat = Heat([float(i) for i in range(len(z[0]))], _numbers(z), z, "mean weight", SHARE)
    sentence = (
        "What each sublayer reads: the mean weight of every source that is there by then. Source 0 is the embedding, the "
        "last row is the output. A bright diagonal is a sublayer that reads its predecessor; a bright first column keeps "
        "the embedding in use."
    )
    title, axis = "Weights over depth", "source (0 = embedding)"
    return Panel("depth_weights", title, sentence, axis, "sublayer", heat=heat, wide=True)


def _cross_layer(cosines: CrossLayer) -> Panel:
    return Panel(
        "cross_layer",
        "Short forms of cross-layer attention",
        "Cosine with attention over the keys and values of two layers (arXiv 2410.17897, Fig. 4): the higher, the better "
        "the value residual stands for it.",
        LAYER,
        "cosine, mean over tokens",
        [
            _by_layer(cosines.current_previous, "½A(V + V_prev)"),
            _by_layer(cosines.current_first, "½A(V + V_1)"),
            _by_layer(cosines.identity_previous, "AV + V_prev"),
            _by_layer(cosines.identity_first, "AV + V_1"),
        ],
        bounds=COSINE,
    )


def _io(record: Diagnosis) -> Panel:
    lines = _drawable(
        _by_layer(record.measures.attention_io_similarity, "attention: cos(x, x + Attn(x))", OTHERS[0]),
        _by_layer(record.measures.layer_io_similarity, "layer: cos(x, layer(x))", OTHERS[1]),
    )
    sentence = (
        "How little a sublayer turns the stream. The attention with the highest cosine goes first in arXiv 2406.15786, "
        "whole layers in ShortGPT; values near 1 are candidates, and only a measured damage decides."
    )
    title = "What attention and whole layers change"
    return Panel("io_similarity", title, sentence, LAYER, "cosine", lines, bounds=COSINE)


def _io_of_streams(record: Diagnosis, single: ByStream) -> list[Panel]:
    panels = []
    for name, what in (("attention_io_similarity", "attention"), ("layer_io_similarity", "whole layers")):
        if dict(single)[name] is not None:
            sentence = f"As above for {what}, in each residual stream and in their mean."
            lines = _each(record, name, _by_layer(dict(record.measures)[name], color=QUIET))
            title, key = f"Single streams: {what}", f"{name}_by_stream"
            panels.append(Panel(key, title, sentence, LAYER, "cosine", lines, bounds=COSINE))
    return panels


def _drawable(*lines: Line) -> list[Line]:
    return [line for line in lines if any(height is not None for height in line.y)]


def _concentration(record: Diagnosis) -> Panel:
    measure = record.measures.entropy
    layer, low = _lowest(measure)
    even = math.log(record.settings.length)
    sentence = (
        f"Entropy of token importance in nats; {even:.2f} would be an even spread. Lower is more concentrated: {low:.2f} at "
        f"layer {layer}."
    )
    lines = [_by_layer(measure, color=QUIET)]
    return Panel("entropy", "Concentration", sentence, LAYER, "entropy (nats)", lines, bounds=(0, even))


def _top(record: Diagnosis) -> Panel:
    rows = record.measures.top_importance.mean
    z = [list(column) for column in zip(*rows, strict=True)]
    heat = Heat(_numbers(rows), [float(i + 1) for i in range(len(z))], z, "share of all attention, a′", SHARE)
    sentence = (
        "The i-th largest importance of a sequence, by layer. One bright row at the bottom: a single sink; several: attention "
        "is shared by a few tokens, wherever they stand."
    )
    return Panel("top_importance", "TOP-i importance", sentence, LAYER, "rank i", heat=heat)


def _smoothing(record: Diagnosis) -> Panel:
    measure = record.measures.token_similarity
    layer, top = highest(measure)
    sentence = (
        "Mean cosine between different tokens' hidden states; high means over-smoothing. The most is "
        f"{top:.2f}, entering layer {layer}."
    )
    lines = _each(record, "token_similarity", _by_layer(measure, color=QUIET))
    return Panel("token_similarity", "Over-smoothing", sentence, LAYER, "mean cosine", lines, bounds=COSINE)


def _flatness(record: Diagnosis) -> Panel:
    lines = _drawable(
        _by_layer(record.measures.mlp_l1_l2, "first token", FIRST),
        _by_layer(record.measures.mlp_l1_l2_others, "median of the others", QUIET),
    )
    flat = math.sqrt(record.model.hidden_size)
    sentence = (
        f"L1 over L2 norm of what the MLP adds: √C = {flat:.0f} for a flat vector, near 1 for a "
        "few huge channels. A fall for the first token marks the MLP that writes (or erases) its massive activation."
    )
    return Panel("mlp_l1_l2", "Flatness of the MLP's output", sentence, LAYER, "L1 / L2", lines, bounds=(1, flat))


def _stream(record: Diagnosis) -> Panel:
    measure = record.measures.stream_norm
    sentence = (
        "Mean norm of the hidden states that enter each layer. Pre-norm models grow with depth, so that later layers weigh "
        "less; a first token with a huge norm lifts the mean as well."
    )
    title = "Magnitude of the residual stream"
    lines = _each(record, "stream_norm", _by_layer(measure, color=QUIET))
    return Panel("stream_norm", title, sentence, LAYER, "mean L2 norm", lines, log_y=True, bounds=(0, math.inf))


def _spectrum(record: Diagnosis) -> Panel:
    rows, shown = record.measures.value_spectrum.mean, 64
    z = [[None if not v or not row[0] else math.log10(max(v / row[0], 1e-6)) for v in row[:shown]] for row in rows]
    heat = Heat([float(i + 1) for i in range(len(z[0]))], _numbers(z), z, "log₁₀ λₖ / λ₁", (-3.0, 0.0))
    sentence = (
        "Eigenvalues of the value covariance (all heads together) relative to the largest. Rows that darken early have values of "
        f"low rank. The record holds all {len(rows[0])}; shown are the first {len(z[0])}."
    )
    return Panel("value_spectrum", "Spectrum of the values", sentence, "eigenvalue k", LAYER, heat=heat, wide=True)


def _position_table(table: PositionTable) -> Panel:
    named = ", ".join(f"{row} ({table.norms[row]:.2f})" for row in table.outliers[:4]) or "none"
    sentence = (
        f"Norm of each row of the learned position table; the median is {table.median:.2f}. Rows above 1.5 times that: "
        f"{named}."
    )
    lines = [Line("norm", _numbers(table.norms), table.norms, color=QUIET)]
    return Panel("position_table", "Position table", sentence, "position", "L2 norm of the row", lines, wide=True)


def _numbers(rows: Sequence[object]) -> list[float]:
    return [float(i) for i in range(len(rows))]

"""The figures, cards and tables of a diagnosis, from its record alone."""

import math
from typing import Any

from crosslayer.diagnosis.record import DiagnosisRecord
from crosslayer.output.page import Table
from crosslayer.output.panel import COLORS, QUIET, Heat, Line, Panel, by_position
from crosslayer.output.record import Measure

LAYER = "layer"
FIRST, *OTHERS = COLORS  # the first token has one color on the whole page, what is not about it has others
SHARE, COSINE = (0.0, 1.0), (-1.0, 1.0)  # what is possible


def panels(record: DiagnosisRecord) -> list[Panel]:
    """Return all figures of the page, in order."""
    averaged, without_first, by_head = _similarities(record)
    made = [
        _positions(record),
        _sink_share(record),
        _ratio(record, "hidden_norm_ratio", "Hidden-state peak", "norm, first ÷ median of the others", _peak_words),
        _ratio(record, "value_norm_ratio", "Value drain", "norm, first ÷ median of the others", _drain_words),
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
    if "cross_layer_current_previous" in record.measures:
        made.append(_cross_layer(record))
    if record.position_table is not None:
        made.append(_position_table(record.position_table))
    return made


def cards(record: DiagnosisRecord) -> list[tuple[str, str, str]]:
    """Return the headline cards: title, figure, explanation."""
    sink, share = record.verdict["sink"], record.verdict["kv_share"]
    _, (layer, peak) = _extremes(record.measures["hidden_norm_ratio"])
    result = [
        (
            "Strongest sink",
            f"{sink['strongest_share']:.0%}",
            f"of layer {sink['strongest']}'s attention goes to the first token",
        ),
        ("Hidden-state peak", f"{peak:.3g}×", f"the median norm, entering layer {layer}"),
    ]
    whole, rest = (_top_half(record, name) for name in ("map_similarity", "map_similarity_without_first"))
    if whole is not None and rest is not None:
        result.append(
            (
                "Neighbouring maps",
                f"{whole:.2f} → {rest:.2f}",
                "mean cosine in the top half, with and without the first column",
            )
        )
    ranked = record.verdict["redundant"]["attention"]
    if ranked:
        result.append(
            (
                "Redundant attention",
                f"layer {ranked[0]['layer']}",
                f"cos(x, x + Attn(x)) = {ranked[0]['similarity']:.3f}",
            )
        )
    if share is not None and share["paper"]["followers"]:
        result.append(
            (
                "Candidate KV cache",
                f"{share['paper']['uniattn']:.2%}",
                "would stay with UniAttn's superblocks; unproven until retrofitted",
            )
        )
    return result


def tables(record: DiagnosisRecord) -> list[Table]:
    """Return the tables below the figures: top tokens, candidates, settings."""
    tokens = [
        [str(layer), [f"{_visible(entry)} {entry['share']:.1%}" for entry in entries]]
        for layer, entries in enumerate(record.top_tokens)
        if entries
    ]
    made_with = record.environment["versions"]
    settings = {
        **record.model,
        **record.settings,
        **{f"{k} version": v for k, v in made_with.items()},
        **record.environment["machine"],
    }
    settings |= {"seconds": f"{record.seconds:.1f}", "masks": _counted(record.model["masks"])}
    rows: list[list[str | list[str]]] = [[key.replace("_", " "), str(value)] for key, value in settings.items()]
    title = "Top tokens by layer (share of all attention that their most important occurrences receive)"
    return [(title, ["layer", "tokens"], tokens), ("Settings and versions", ["setting", "value"], rows)]


def _visible(entry: dict[str, Any]) -> str:
    """Show white space in a token, and where the token is the first of the sequence."""
    text = entry["token"].replace("\n", "\\n").replace(" ", "␣") if entry["token"] != "first token" else "first token"
    return f"{text} (first)" if entry["first"] and entry["token"] != "first token" else text


def _counted(masks: list[str | None]) -> str:
    kinds = [mask or "no attention" for mask in masks]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


def _by_layer(measure: Measure, name: str = "", color: str | None = None) -> Line:
    x = _range(measure.mean)
    low, high = (None if measure.ci95 is None else [pair[end] for pair in measure.ci95] for end in (0, 1))
    return Line(name, x, measure.mean, low, high, color)


def _known(values: list[Any]) -> list[tuple[int, float]]:
    return [(i, value) for i, value in enumerate(values) if value is not None]


def _extremes(measure: Measure) -> tuple[tuple[int, float], tuple[int, float]]:
    known = _known(measure.mean) or [(0, math.nan)]
    return min(known, key=lambda pair: pair[1]), max(known, key=lambda pair: pair[1])


def _positions(record: DiagnosisRecord) -> Panel:
    found = record.importance_by_position
    z = [[None if v is None else math.log10(max(v * found["length"], 1e-3)) for v in row] for row in found["mean"]]
    drawn = by_position(found["edges"], found["length"], z, "log₁₀ of a′ · T", (-1.0, 2.0))
    sentence = (
        "How much attention each position receives, against an even spread (0 = even, 1 = ten times as much), positions on a "
        "logarithmic axis. A bright column at the left is a sink at the first token; causal models give early positions more "
        "in any case, as more rows see them."
    )
    title, axis = "Importance by position", "position (0 = first token)"
    return Panel("importance_by_position", title, sentence, axis, LAYER, wide=True, **drawn)


def _sink_share(record: DiagnosisRecord) -> Panel:
    share, rate = record.measures["first_token_share"], record.measures["sink_rate"]
    _, (layer, top) = _extremes(share)
    sentence = (
        f"The first token's share of all attention, at most {top:.1%} in layer {layer}: {record.verdict['sink']['over_even']:.1f} "
        "times what even attention would give. The sink rate is the share of heads that give it more than 0.3 on average."
    )
    lines = [_by_layer(share, "first token's share a′₀", FIRST), _by_layer(rate, "sink rate", OTHERS[0])]
    return Panel("first_token_share", "Attention on the first token", sentence, LAYER, "share", lines, bounds=SHARE)


def _ratio(record: DiagnosisRecord, key: str, title: str, axis: str, words) -> Panel:
    measure = record.measures[key]
    lines = [_by_layer(measure, color=FIRST)]
    return Panel(key, title, words(measure), LAYER, axis, lines, log_y=True, bounds=(0, math.inf))


def _peak_words(measure: Measure) -> str:
    _, (layer, top) = _extremes(measure)
    return (
        f"Norm of the first token's hidden state, entering each layer, over the median of the others: {top:.3g} at layer {layer}. "
        "A jump marks the layer before it as the one that makes the sink; 1 is unremarkable."
    )


def _drain_words(measure: Measure) -> str:
    (layer, low), _ = _extremes(measure)
    return (
        f"Norm of the first token's value states over the median of the others: {low:.2f} at layer {layer}. Where the share of "
        "attention is high and this is low, attention is parked where it does little."
    )


def _similarities(record: DiagnosisRecord) -> list[Panel]:
    texts = {
        "map_similarity": (
            "Map similarity",
            "Cosine between the head-averaged softmax maps of every two layers. Bright blocks on the diagonal look like layers "
            "that could share one map: compare the next figure before you believe it.",
        ),
        "map_similarity_without_first": (
            "Map similarity without the first column",
            "The same with the first column set aside: what remains is similarity of content, not of a common sink.",
        ),
        "map_similarity_per_head": (
            "Map similarity head by head",
            "The cosine of equally numbered heads, averaged over heads: a sharing layer reads single heads, not their average.",
        ),
    }
    made = []
    for key, (title, sentence) in texts.items():
        z = record.measures[key].mean
        heat = Heat(_range(z), _range(z), z, "cosine", (0.0, 1.0), square=True)
        made.append(Panel(key, title, sentence, LAYER, LAYER, heat=heat))
    return made


def _adjacent(record: DiagnosisRecord) -> Panel:
    names = {
        "map_similarity": "head-averaged",
        "map_similarity_without_first": "without first column",
        "map_similarity_per_head": "head by head",
    }
    lines = []
    for (key, name), color in zip(names.items(), OTHERS, strict=False):
        measure = record.measures[key]
        pairs = range(len(measure.mean) - 1)
        y = [measure.mean[i + 1][i] for i in pairs]
        bands = [None if measure.ci95 is None else [measure.ci95[i + 1][i][end] for i in pairs] for end in (0, 1)]
        lines.append(Line(name, [float(i + 1) for i in pairs], y, *bands, color=color))
    whole, rest = _top_half(record, "map_similarity"), _top_half(record, "map_similarity_without_first")
    sentence = "Cosine of each layer's map with the one below it."
    if whole is not None and rest is not None:
        sentence += (
            f" In the top half the mean is {whole:.2f}, and {rest:.2f} without the first column. A gap between the two is "
            "what a common sink adds to an apparent redundancy."
        )
    ends = (-0.04, 1.04)  # as in the maps of it
    title, key = "Neighbouring layers", "adjacent_map_similarity"
    return Panel(key, title, sentence, LAYER, "cosine", lines, wide=True, bounds=SHARE, y_range=ends)


def _top_half(record: DiagnosisRecord, key: str) -> float | None:
    return record.verdict["neighbours"][key]


def _cross_layer(record: DiagnosisRecord) -> Panel:
    names = {
        "cross_layer_current_previous": "½A(V + V_prev)",
        "cross_layer_current_first": "½A(V + V_1)",
        "cross_layer_identity_previous": "AV + V_prev",
        "cross_layer_identity_first": "AV + V_1",
    }
    return Panel(
        "cross_layer",
        "Short forms of cross-layer attention",
        "Cosine with attention over the keys and values of two layers (ResFormer, Fig. 4): the higher, the better the "
        "value residual stands for it.",
        LAYER,
        "cosine, mean over tokens",
        [_by_layer(record.measures[key], name) for key, name in names.items()],
        bounds=COSINE,
    )


def _io(record: DiagnosisRecord) -> Panel:
    names = {
        "attention_io_similarity": "attention: cos(x, x + Attn(x))",
        "layer_io_similarity": "layer: cos(x, layer(x))",
    }
    lines = [
        _by_layer(record.measures[key], name, color)
        for (key, name), color in zip(names.items(), OTHERS, strict=False)
        if key in record.measures
    ]
    sentence = (
        "How little a sublayer turns the stream. LLMDrop drops the attention with the highest cosine, ShortGPT whole layers; "
        "values near 1 are candidates, and only a measured damage decides."
    )
    title = "What attention and whole layers change"
    return Panel("io_similarity", title, sentence, LAYER, "cosine", lines, bounds=COSINE)


def _concentration(record: DiagnosisRecord) -> Panel:
    measure = record.measures["entropy"]
    (layer, low), _ = _extremes(measure)
    even = math.log(record.settings["length"])
    sentence = (
        f"Entropy of token importance in nats; {even:.2f} would be an even spread. Lower is more concentrated: {low:.2f} at "
        f"layer {layer}."
    )
    lines = [_by_layer(measure, color=QUIET)]
    return Panel("entropy", "Concentration", sentence, LAYER, "entropy (nats)", lines, bounds=(0, even))


def _top(record: DiagnosisRecord) -> Panel:
    rows = record.measures["top_importance"].mean
    z = [list(column) for column in zip(*rows, strict=True)]
    heat = Heat(_range(rows), [float(i + 1) for i in range(len(z))], z, "share of all attention, a′", SHARE)
    sentence = (
        "The i-th largest importance of a sequence, by layer. One bright row at the bottom: a single sink; several: attention "
        "is shared by a few tokens, wherever they stand."
    )
    return Panel("top_importance", "TOP-i importance", sentence, LAYER, "rank i", heat=heat)


def _smoothing(record: DiagnosisRecord) -> Panel:
    measure = record.measures["token_similarity"]
    _, (layer, top) = _extremes(measure)
    sentence = f"Mean cosine between different tokens' hidden states; high means over-smoothing. The most is {top:.2f}, entering layer {layer}."
    lines = [_by_layer(measure, color=QUIET)]
    return Panel("token_similarity", "Over-smoothing", sentence, LAYER, "mean cosine", lines, bounds=COSINE)


def _flatness(record: DiagnosisRecord) -> Panel:
    names = {"mlp_l1_l2": "first token", "mlp_l1_l2_others": "median of the others"}
    lines = [
        _by_layer(record.measures[key], name, color)
        for (key, name), color in zip(names.items(), (FIRST, QUIET), strict=True)
        if key in record.measures
    ]
    flat = math.sqrt(record.model["hidden_size"])
    sentence = (
        f"L1 over L2 norm of what the MLP adds: √C = {flat:.0f} for a flat vector, near 1 for a "
        "few huge channels. A fall for the first token marks the MLP that writes (or erases) its massive activation."
    )
    return Panel("mlp_l1_l2", "Flatness of the MLP's output", sentence, LAYER, "L1 / L2", lines, bounds=(1, flat))


def _stream(record: DiagnosisRecord) -> Panel:
    measure = record.measures["stream_norm"]
    sentence = (
        "Mean norm of the hidden states that enter each layer. Pre-norm models grow with depth, so that later layers weigh "
        "less; a first token with a huge norm lifts the mean as well."
    )
    title, lines = "Magnitude of the residual stream", [_by_layer(measure, color=QUIET)]
    return Panel("stream_norm", title, sentence, LAYER, "mean L2 norm", lines, log_y=True, bounds=(0, math.inf))


def _spectrum(record: DiagnosisRecord) -> Panel:
    rows, shown = record.measures["value_spectrum"].mean, 64
    z = [[None if not v or not row[0] else math.log10(max(v / row[0], 1e-6)) for v in row[:shown]] for row in rows]
    heat = Heat([float(i + 1) for i in range(len(z[0]))], _range(z), z, "log₁₀ λₖ / λ₁", (-3.0, 0.0))
    sentence = (
        "Eigenvalues of the value covariance (all heads together) relative to the largest. Rows that darken early have values of "
        f"low rank. The record holds all {len(rows[0])}; shown are the first {len(z[0])}."
    )
    return Panel("value_spectrum", "Spectrum of the values", sentence, "eigenvalue k", LAYER, heat=heat, wide=True)


def _position_table(table: dict[str, Any]) -> Panel:
    named = ", ".join(f"{row} ({table['norms'][row]:.2f})" for row in table["outliers"][:4]) or "none"
    sentence = f"Norm of each row of the learned position table; the median is {table['median']:.2f}. Rows above 1.5 times that: {named}."
    lines = [Line("norm", _range(table["norms"]), table["norms"], color=QUIET)]
    return Panel("position_table", "Position table", sentence, "position", "L2 norm of the row", lines, wide=True)


def _range(rows: list[Any]) -> list[float]:
    return [float(i) for i in range(len(rows))]

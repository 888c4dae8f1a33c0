"""Measures by layer or position as figures and sentences need them: curves, extremes, means, two models compared."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from crosslayer.output.formatting import UNKNOWN, Table, listed, plural, ranges
from crosslayer.output.panel import QUIET, Heat, Line, Panel
from crosslayer.output.record import Measure, PositionBins
from crosslayer.stats.bootstrap import plain
from crosslayer.verbs.diagnose.result import Diagnosis, OutputGates, TextSettings

LAYER = "layer"
LAST_ROW = ("The last token's attention, by position", "Attention of the last token to each position, mean over heads.")
SHARE, COSINE, NORM = (0.0, 1.0), (-1.0, 1.0), (0.0, math.inf)  # possible values


def curve(measure: Measure, name: str = "", color: str | None = None, band: bool = True, dashed: bool = False) -> Line:
    """Return the line of a measure over the layers, with its interval as a band."""
    low, high = (None, None) if measure.ci95 is None or not band else zip(*measure.ci95, strict=True)
    return Line(name, numbers(measure.mean), measure.mean, low, high, color, dashed)


def by_layer(key: str, title: str, sentence: str, axis: str, lines: list[Line], **options: Any) -> Panel:
    """Return a figure of lines over layers, by default of cosines; lines without any point are dropped, except one."""
    drawn = [line for line in lines if any(height is not None for height in line.y)] or lines[:1]
    options.setdefault("bounds", COSINE)
    return Panel(key, title, sentence, LAYER, axis, drawn, **options)


def from_one(line: Line) -> Line:
    """Return a line of cosines as 1 − cosine, which shows on a logarithmic axis how values near 1 differ."""
    y, high, low = ([None if v is None else 1 - v for v in values or ()] for values in (line.y, line.low, line.high))
    return replace(line, y=y, low=low or None, high=high or None)


def numbers(rows: Sequence[object]) -> list[float]:
    """Return the positions of rows on an axis that counts from 0."""
    return [float(i) for i in range(len(rows))]


def position_panel(
    key: str, title: str, sentence: str, bins: PositionBins, scale: float, label: str, limits: tuple[float, float],
    position: int = 0,
) -> Panel:  # fmt: skip
    """Return a heat map of log10(mean · `scale`) by layer and position; `limits` are the ends of the color scale.

    Position p reaches from p + 1 to p + 2 of a logarithmic axis. `position` always has a label.
    """
    # a floor two decades below the scale, since the logarithm of 0 would be −∞
    z = plain(np.log10(np.maximum(np.array(bins.mean, dtype=float) * scale, 10 ** (limits[0] - 2))))  # (L, bins)
    edges = [*bins.edges, bins.length]
    columns = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in itertools.pairwise(edges)]
    heat = Heat([edge + 1.0 for edge in edges], [*range(len(z))], z, label, limits, columns=columns)

    # labels at the middle of their positions: 0, 1, 2, 5, 10 …, and `position` instead of its neighbors
    labeled = [0]
    for power in range(len(str(bins.length))):
        # fewer labels on a longer axis
        digits = (1, 2, 5) if power == 0 or bins.length <= 1000 else (1,)
        labeled += [digit * 10**power for digit in digits]
    near = 1.7 if position >= 10 else 1.0  # labels are wider than single positions there
    shown = [p for p in labeled if p < bins.length and not 1 / near < (p + 1.5) / (position + 1.5) < near]
    ticks = {math.sqrt((p + 1) * (p + 2)): str(p) for p in sorted({*shown, position})}
    axis = "position (0 = first token)"
    return Panel(key, title, sentence, axis, LAYER, heat=heat, log_x=True, wide=True, x_ticks=ticks)


def head_panel(key: str, measure: Measure, token: str, axis: str = "head") -> Panel:
    """Return a heat map of the attention that a token receives, by layer and head, (L, H), or what else `axis` says."""
    heat = Heat(numbers(measure.mean[0]), numbers(measure.mean), measure.mean, "attention", SHARE)
    title, sentence = f"Attention on {token}, by {axis}", f"Attention that {token} receives, in each layer and {axis}."
    return Panel(key, title, sentence, axis, LAYER, heat=heat)


def gate_panels(gates: OutputGates, before: Measure) -> list[Panel]:
    """Return the output gates by layer and head, and attention on the first token `before` (L,) and after them."""
    heat = Heat(numbers(gates.mean.mean[0]), numbers(gates.mean.mean), gates.mean.mean, "gate", SHARE)
    sentence = "What multiplies each head's output before W_o, mean over tokens and channels."
    lines = [curve(before, "before the gate"), curve(gates.first_token_share, "after the gate")]
    title = "Attention on the first token, after the gate"
    text = "Each row of a map counts as much as its gate is open."
    return [
        Panel("output_gates", "Output gates, by head", sentence, "head", LAYER, heat=heat),
        Panel("gated_first_token", title, text, LAYER, "share", lines, bounds=SHARE),
    ]


def known(measure: Measure) -> dict[int, float]:
    """Return the means by layer, without layers that lack the measure."""
    return {layer: mean for layer, mean in enumerate(measure.mean) if mean is not None}


def highest(measure: Measure) -> tuple[int, float]:
    """Return the layer with the highest mean, and that mean; layer 0 and NaN if no layer has the measure."""
    return max(known(measure).items(), key=lambda pair: pair[1], default=(0, math.nan))


def lowest(measure: Measure) -> tuple[int, float]:
    """Return the layer with the lowest mean, and that mean; layer 0 and NaN if no layer has the measure."""
    return min(known(measure).items(), key=lambda pair: pair[1], default=(0, math.nan))


def mean_over_layers(measure: Measure) -> float:
    """Return the mean over the layers that have the measure; NaN if no layer has it."""
    means = known(measure).values()
    return sum(means) / len(means) if means else math.nan


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Return the table of facts about a model."""
    return "Model", ["fact", "value"], [[name.replace("_", " "), str(fact)] for name, fact in facts.items()]


def measured_on(settings: TextSettings, over: str) -> str:
    """Return the text that was measured, and what the bands of the figures are: over sequences, or over documents."""
    text = f"{settings.sequences} sequences of {settings.length} tokens, {settings.text or 'own tokens'}"
    whole = len({document for document in settings.documents if document >= 0})
    joined = sum(document < 0 for document in settings.documents)
    origins = [plural(whole, "document")] if whole else []
    origins += [f"{joined} joined from several documents"] if joined else []
    origin = f" · from {listed(origins)}" if origins else ""
    bands = "bootstrap over documents" if over == "documents" else "Student-t over sequences, taken as independent"
    return f"{text}{origin} · bands: 95% intervals ({bands}), clipped to possible values"


def massive_in(record: Diagnosis) -> str:
    """Return in which layers and channels the first token has massive activations."""
    massive = record.verdict.massive
    if massive is None:
        return "none" if record.top_activations else UNKNOWN
    return f"{ranges(massive.layers)} (channels {listed([str(channel) for channel in massive.channels])})"


def beside(record: Diagnosis, baseline: Diagnosis) -> Table:
    """Return what both models show, a column each."""
    columns = []
    for model in (record, baseline):
        measures, sink, neighbors = model.measures, model.verdict.sink, model.verdict.neighbors
        peak_layer, peak = highest(measures.hidden_norm_ratio)
        drain_layer, drain = lowest(measures.value_norm_ratio)
        similar, without_first = neighbors.map_similarity, neighbors.map_similarity_without_first
        columns.append(
            {
                "layers, with attention": f"{model.model.layers}, {model.model.attention_layers}",
                "sink layers": ranges(sink.layers) or "none",
                "attention on the first token, mean over layers": f"{mean_over_layers(measures.first_token_share):.1%}",
                "attention on the first token, at most": f"{sink.strongest_share:.1%} (layer {sink.strongest})",
                "massive activations of the first token": massive_in(model),
                "hidden norm of the first token ÷ median, at most": f"{peak:.3g} (layer {peak_layer})",
                "value norm of the first token ÷ median, at least": f"{drain:.2f} (layer {drain_layer})",
                "map similarity of neighbors, upper half": UNKNOWN if similar is None else f"{similar:.2f}",
                "… ignoring the first token": UNKNOWN if without_first is None else f"{without_first:.2f}",
                "cos(x, x + Attn(x)), mean over layers": f"{mean_over_layers(measures.attention_io_similarity):.3f}",
                "entropy of attention, mean over layers": f"{mean_over_layers(measures.entropy):.2f} nats",
            }
        )
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return "Compared with the baseline", ["", record.model.name, f"{baseline.model.name} (baseline)"], rows


def panels_beside(panels: Sequence[Panel], baseline: Sequence[Panel], names: tuple[str, str]) -> list[Panel]:
    """Return a model's figures with the baseline's: its lines dashed in the same figure, its heat map behind.

    `names` are those of the model and of the baseline.
    """
    name, other_name = names
    others = {panel.key: panel for panel in baseline}
    figures = []
    for panel in panels:
        other = others.get(panel.key)
        if other is None:
            figures.append(panel)
        elif panel.heat is None:
            lines = [replace(line, name=line.name or name) for line in panel.lines]
            for line in other.lines:  # without bands, which would cover the model's
                shown = f"{other_name}: {line.name}" if line.name else other_name
                color = line.color or QUIET
                lines.append(replace(line, name=shown, low=None, high=None, color=color, dashed=True))
            figures.append(replace(panel, lines=lines))
        else:
            figures += [panel, replace(other, key=f"{panel.key}_baseline", title=f"{panel.title}: {other_name}")]
    return figures

"""The cards, figures and tables of an intervention, from its record alone."""

import math

from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, QUIET, Line, Panel, by_position, same_scale
from crosslayer.output.record import PositionBins
from crosslayer.output.words import measured_on, ranges
from crosslayer.verbs.intervene.record import Change, LayerMeasure, Place
from crosslayer.verbs.intervene.result import Effect
from crosslayer.verbs.intervene.words import describe, mean_of, probes, sentences, top_of

LAYER = "layer"
SHARE = "attention received"
LINES = 4  # of a figure
FAINTEST = 1e-4  # share of attention, at which the color scale begins


def layout(record: Effect) -> Page:
    """Return the parts of the page."""
    settings = record.settings
    text = measured_on(settings.sequences, settings.length, settings.text, settings.documents)
    return Page(
        title=f"Intervention on {settings.model}",
        subtitle=f"{describe(record.interventions)} · {text}",
        cards=cards(record),
        words=sentences(record),
        panels=panels(record),
        tables=tables(record),
    )


def cards(record: Effect) -> list[tuple[str, str, str]]:
    """Return the headline cards: title, figure, explanation."""
    main = record.places[0]
    peak = main.hidden_norm_ratio
    peaks = f"{top_of(peak.before):.3g} → {top_of(peak.after):.3g}×"
    cards = [
        (f"Attention on {main.position}", _shares(main), "received from other tokens, mean over layers"),
        (f"Hidden norm of {main.position}", peaks, "the median of the others, in its highest layer"),
    ]
    first = first_token(record)
    if first is not None:
        cards.append(("Attention on the first token", _shares(first), "mean over layers"))
    if main.loss_behind is not None:
        change = main.loss_behind.difference
        span = "a single sequence" if change.ci95 is None else f"95 %: {change.ci95[0]:+.3f} to {change.ci95[1]:+.3f}"
        cards.append(("Loss behind it", f"{change.mean:+.3f}", f"nats a token; {span}"))
    return cards


def first_token(record: Effect) -> Place | None:
    """Return what was measured at the first token, None where it is itself intervened on."""
    return next((place for place in record.places if place.role == "first token"), None)


def _shares(place: Place) -> str:
    """Return the attention received before and after, on average over layers."""
    change = place.attention_received
    return f"{mean_of(change.before.mean):.1%} → {mean_of(change.after.mean):.1%}"


def panels(record: Effect) -> list[Panel]:
    """Return all figures of the page, in order."""
    sides = record.attention_by_position
    heats = [_heat(record, "before", sides.before), _heat(record, "after", sides.after)]
    received = _received_panels(record)
    shares = same_scale([*received, *_scan_panels(record), *_control_panels(record)])
    return [*heats, *shares[: len(received)], *_state_panels(record), *shares[len(received) :]]


def _received_panels(record: Effect) -> list[Panel]:
    """Return the attention that the position receives, and the first token beside it."""
    main, first = record.places[0], first_token(record)
    at, rows = f"position {main.position}", "later tokens" if record.model.causal else "the other tokens"
    words, bounds = f"Mean attention that {at} receives from {rows}.", (0.0, 1.0)
    panels = [_sides("attention_received", f"Attention on {at}", words, SHARE, main.attention_received, bounds)]
    if first is not None:
        words, title = f"The same for the first token: what it loses where {at} gains.", "Attention on the first token"
        panels.append(_sides("first_token", title, words, SHARE, first.attention_received, bounds))
    return panels


def _state_panels(record: Effect) -> list[Panel]:
    """Return the norms of the position's states, and the shape of what the MLP adds to it."""
    main = record.places[0]
    at, ratio, norm = f"position {main.position}", "norm ÷ median of the others", (0.0, math.inf)
    words = f"Hidden state of {at}, entering each layer. A jump marks the layer before it as the maker of a peak."
    panels = [_sides("hidden_norm_ratio", "Hidden-state peak", words, ratio, main.hidden_norm_ratio, norm)]
    words = f"Value states of {at}. Low where attention is high: attention parked where it does little."
    panels.append(_sides("value_norm_ratio", "Value drain", words, ratio, main.value_norm_ratio, norm))
    if main.mlp_l1_l2 is not None:
        words = f"‖u‖₁ / ‖u‖₂ of what the MLP adds at {at}: near 1 for a single peak, high for a flat vector."
        bounds = (1.0, math.sqrt(record.model.hidden_size))
        panels.append(_sides("mlp_l1_l2", "Shape of the MLP's output", words, "L1 / L2", main.mlp_l1_l2, bounds))
    return panels


def _scan_panels(record: Effect) -> list[Panel]:
    lines = []
    for i, trial in enumerate(record.scan):
        name = f"in layers {ranges(trial.layers)}" if trial.layers else "in no layer"
        lines.append(_mean_line(name, trial.attention_received, COLORS[i % len(COLORS)]))
    words = f"The intervention in some layers only: attention on position {record.places[0].position}{probes(record)}."
    return _divided("scan", "In which layers it matters", words, lines)


def _control_panels(record: Effect) -> list[Panel]:
    lines, names = [], []
    for i, control in enumerate(record.controls):
        name, color = f"control {i + 1}", COLORS[i % len(COLORS)]
        lines.append(_mean_line(f"{name}, before", control.before.attention_received, color, dashed=True))
        lines.append(_mean_line(f"{name}, after", control.after.attention_received, color))
        names.append(f"{i + 1}: {describe(control.interventions)}")
    words = f"Attention on the position of each control{probes(record)}. {'; '.join(names)}."
    return _divided("controls", "Controls", words, lines)


def _divided(key: str, title: str, words: str, lines: list[Line]) -> list[Panel]:
    """Return figures of at most `LINES` lines each, evenly filled."""
    if not lines:
        return []
    figures = math.ceil(len(lines) / LINES)
    step = math.ceil(len(lines) / figures)
    panels = []
    for number in range(figures):
        name = key if figures == 1 else f"{key}_{number + 1}"
        panels.append(Panel(name, title, words, LAYER, SHARE, lines[number * step : (number + 1) * step]))
    return panels


def _sides(key: str, title: str, words: str, axis: str, change: Change, bounds: tuple[float, float]) -> Panel:
    """Return a figure of a measure by layer, before and after, with bands."""
    lines = [_line("before", change.before, QUIET), _line("after", change.after, COLORS[0])]
    return Panel(key, title, words, LAYER, axis, lines, log_y=key.endswith("norm_ratio"), bounds=bounds)


def _line(name: str, measure: LayerMeasure, color: str) -> Line:
    low, high = (None if measure.ci95 is None else [pair[end] for pair in measure.ci95] for end in (0, 1))
    return Line(name, _layers(measure), measure.mean, low, high, color)


def _mean_line(name: str, measure: LayerMeasure, color: str, dashed: bool = False) -> Line:
    return Line(name, _layers(measure), measure.mean, color=color, dashed=dashed)


def _layers(measure: LayerMeasure) -> list[float]:
    return [float(layer) for layer in range(len(measure.mean))]


def _heat(record: Effect, side: str, bins: PositionBins) -> Panel:
    z = []
    for row in bins.mean:
        z.append([None if share is None else math.log10(max(share, FAINTEST)) for share in row])
    limits = (math.log10(FAINTEST), 0.0)
    drawn = by_position(bins.edges, bins.length, z, "log₁₀ of the share", limits, record.places[0].position)
    words = (
        "Mean attention that a position receives from the tokens that may see it, positions on a logarithmic axis. "
        "Bright columns are sinks."
    )
    title, axis = f"Attention received by position, {side}", "position (0 = first token)"
    return Panel(f"attention_{side}", title, words, axis, LAYER, wide=True, **drawn)


def tables(record: Effect) -> list[Table]:
    """Return the table of settings and versions."""
    rows = {**record.model.model_dump(by_alias=True), **record.settings.model_dump(exclude={"model"})}
    rows |= {f"{package} version": version for package, version in record.environment.versions.items()}
    rows |= {**record.environment.machine.model_dump(), "seconds": f"{record.seconds:.1f}"}
    shown: list[list[str | list[str]]] = []
    for name, setting in rows.items():
        if setting is not None:
            shown.append([name.replace("_", " "), str(setting)])
    return [("Settings and versions", ["setting", "value"], shown)]

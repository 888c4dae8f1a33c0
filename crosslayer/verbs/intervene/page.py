"""The cards and figures of an intervention, from its record alone."""

import math

from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, QUIET, Line, Panel, same_scale
from crosslayer.output.words import measured_on, ranges, signed, signed_interval
from crosslayer.verbs.diagnose.curves import LAYER, NORM, SHARE, curve, highest, mean_over_layers, position_panel
from crosslayer.verbs.intervene.record import Change, Place
from crosslayer.verbs.intervene.result import Effect
from crosslayer.verbs.intervene.words import describe, probes, sentences

RECEIVED = "attention received"
LINES = 4  # of a figure


def layout(record: Effect) -> Page:
    """Return the parts of the page."""
    settings = record.settings
    text = measured_on(settings.sequences, settings.length, settings.text, settings.documents)
    facts = record.model.model_dump(by_alias=True)
    table: Table = ("Model", ["fact", "value"], [[name.replace("_", " "), str(fact)] for name, fact in facts.items()])
    return Page(
        title=f"Intervention on {record.model.name}",
        subtitle=f"{describe(record.interventions)} · {text}",
        cards=_cards(record),
        words=sentences(record),
        panels=_panels(record),
        tables=[table],
    )


def _cards(record: Effect) -> list[tuple[str, str, str]]:
    main, first = record.places[0], _first_token(record)
    peaks = [highest(side)[1] for side in (main.hidden_norm_ratio.before, main.hidden_norm_ratio.after)]
    note = "the median of the others, in its highest layer"
    cards = [
        (f"Attention on {main.position}", _shares(main), "received from other tokens, mean over layers"),
        (f"Hidden norm of {main.position}", f"{peaks[0]:.3g} → {peaks[1]:.3g}×", note),
    ]
    if first is not None:
        cards.append(("Attention on the first token", _shares(first), "mean over layers"))
    if main.loss_behind is not None:
        loss = main.loss_behind.difference
        cards.append(("Loss behind it", signed(loss.mean, 3), f"nats a token; 95 %: {signed_interval(loss.ci95, 3)}"))
    return cards


def _first_token(record: Effect) -> Place | None:
    """Return what was measured at the first token, None where it is itself intervened on."""
    return next((place for place in record.places if place.role == "first token"), None)


def _shares(place: Place) -> str:
    received = place.attention_received
    return f"{mean_over_layers(received.before):.1%} → {mean_over_layers(received.after):.1%}"


def _panels(record: Effect) -> list[Panel]:
    """Return all figures of the page, in order."""
    sides = record.attention_by_position
    sentence = (
        "Mean attention that a position receives from the tokens that may see it, positions on a logarithmic axis. "
        "Bright columns are sinks."
    )
    heats = []
    for side, bins in (("before", sides.before), ("after", sides.after)):
        title, label, scale = f"Attention received by position, {side}", "log₁₀ of the share", (-4.0, 0.0)
        key, position = f"attention_{side}", record.places[0].position
        heats.append(position_panel(key, title, sentence, bins, 1.0, label, scale, position))
    received = _received_panels(record)
    shares = same_scale([*received, *_scan_panels(record), *_control_panels(record)])
    return [*heats, *shares[: len(received)], *_state_panels(record), *shares[len(received) :]]


def _before_and_after(
    key: str, title: str, sentence: str, axis: str, change: Change, bounds: tuple[float, float]
) -> Panel:
    """Return a figure of a measure by layer, before and after, with bands."""
    lines = [curve(change.before, "before", QUIET), curve(change.after, "after", COLORS[0])]
    return Panel(key, title, sentence, LAYER, axis, lines, log_y=bounds == NORM, bounds=bounds)


def _received_panels(record: Effect) -> list[Panel]:
    """Return the attention that the position receives, and the first token beside it."""
    main, first = record.places[0], _first_token(record)
    at, rows = f"position {main.position}", "later tokens" if record.model.causal else "the other tokens"
    sentence, change = f"Mean attention that {at} receives from {rows}.", main.attention_received
    panels = [_before_and_after("attention_received", f"Attention on {at}", sentence, RECEIVED, change, SHARE)]
    if first is not None:
        sentence, change = f"The same for the first token: what it loses where {at} gains.", first.attention_received
        title = "Attention on the first token"
        panels.append(_before_and_after("first_token", title, sentence, RECEIVED, change, SHARE))
    return panels


def _state_panels(record: Effect) -> list[Panel]:
    """Return the norms of the position's states, and the shape of what the MLP adds to it."""
    main = record.places[0]
    at, ratio = f"position {main.position}", "norm ÷ median of the others"
    peak = f"Hidden state of {at}, entering each layer. A jump marks the layer before it as the maker of a peak."
    drain = f"Value states of {at}. Low where attention is high: attention parked where it does little."
    panels = [
        _before_and_after("hidden_norm_ratio", "Hidden-state peak", peak, ratio, main.hidden_norm_ratio, NORM),
        _before_and_after("value_norm_ratio", "Value drain", drain, ratio, main.value_norm_ratio, NORM),
    ]
    if main.mlp_l1_l2 is not None:
        sentence = f"‖u‖₁ / ‖u‖₂ of what the MLP adds at {at}: near 1 for a single peak, high for a flat vector."
        title, bounds = "Shape of the MLP's output", (1.0, math.sqrt(record.model.hidden_size))
        panels.append(_before_and_after("mlp_l1_l2", title, sentence, "L1 / L2", main.mlp_l1_l2, bounds))
    return panels


def _scan_panels(record: Effect) -> list[Panel]:
    lines = []
    for i, trial in enumerate(record.scan):
        name = f"in layers {ranges(trial.layers)}" if trial.layers else "in no layer"
        lines.append(curve(trial.attention_received, name, COLORS[i % len(COLORS)], band=False))
    at = record.places[0].position
    sentence = f"The intervention in some layers only: attention on position {at}{probes(record)}."
    return _divided("scan", "In which layers it matters", sentence, lines)


def _control_panels(record: Effect) -> list[Panel]:
    lines, names = [], []
    for i, control in enumerate(record.controls):
        color, before, after = COLORS[i % len(COLORS)], control.before, control.after
        lines.append(curve(before.attention_received, f"control {i + 1}, before", color, band=False, dashed=True))
        lines.append(curve(after.attention_received, f"control {i + 1}, after", color, band=False))
        names.append(f"{i + 1}: {describe(control.interventions)}")
    sentence = f"Attention on the position of each control{probes(record)}. {'; '.join(names)}."
    return _divided("controls", "Controls", sentence, lines)


def _divided(key: str, title: str, sentence: str, lines: list[Line]) -> list[Panel]:
    """Return figures of at most `LINES` lines each, evenly filled."""
    figures = math.ceil(len(lines) / LINES)
    step = math.ceil(len(lines) / max(figures, 1))
    panels = []
    for number in range(figures):
        name = key if figures == 1 else f"{key}_{number + 1}"
        panels.append(Panel(name, title, sentence, LAYER, RECEIVED, lines[number * step : (number + 1) * step]))
    return panels

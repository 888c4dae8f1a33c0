"""The page of an intervention, its sentences and its few figures, from its record alone."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, QUIET, Line, Panel, same_scale
from crosslayer.output.record import Measure
from crosslayer.output.words import listed, measured_on, ranges, signed, signed_interval
from crosslayer.verbs.diagnose.curves import (
    LAYER,
    NORM,
    SHARE,
    curve,
    highest,
    lowest,
    mean_over_layers,
    position_panel,
)
from crosslayer.verbs.intervene.kinds import Kind, to_entry
from crosslayer.verbs.intervene.result import Change, Effect, PositionChange

RECEIVED = "attention received"
LINES = 4  # of a figure


def describe(interventions: Sequence[Kind]) -> str:
    """Return interventions in words: waiver (position 255) + token_swap (position 0, token bos)."""
    named = []
    for intervention in interventions:
        options = []
        for name, option in to_entry(intervention).items():
            if name == "kind" or (name, option) == ("layers", "all"):
                continue
            if isinstance(option, tuple):
                name = name.removesuffix("s") if len(option) == 1 else name
                whole = all(isinstance(number, int) for number in option)
                option = ranges(option) if whole else f"a vector of {len(option)}"
            options.append(f"{name.replace('_', ' ')} {option}")
        named.append(f"{intervention.kind} ({', '.join(options)})")
    return " + ".join(named)


def sentences(record: Effect) -> list[str]:
    """Return what was measured, in sentences."""
    main, *others = record.positions
    rows = "later tokens'" if record.model.causal else "the other tokens'"
    lines = [_received(f"Position {main.position}", main, rows), _norms(main)]
    if main.loss_behind is not None:
        loss, change = main.loss_behind, main.loss_behind.difference
        lines.append(
            f"The loss behind it goes from {loss.before.mean:.4f} to {loss.after.mean:.4f} nats a token: "
            f"{signed(change.mean)} ({signed_interval(change.ci95)})."
        )
    for other in others:
        if other.role != "left alone":
            name = "The first token" if other.role == "first token" else f"Position {other.position}"
            lines.append(_received(name, other, rows))
    alone = [other for other in others if other.role == "left alone"]
    if alone:
        named = listed([str(place.position) for place in alone])
        most = max(highest(place.attention_received.after)[1] for place in alone)
        lines.append(f"Of the positions left alone ({named}) none receives more than {most:.1%} in any layer.")
    if record.scan:
        means = [(ranges(trial.layers) or "none", mean_over_layers(trial.attention_received)) for trial in record.scan]
        tried = "; ".join(f"{layers} {mean:.1%}" for layers, mean in means)
        lines.append(
            f"Attention received on average over layers, by the layers in which the intervention acts{probes(record)}: "
            f"{tried}."
        )
    for control in record.controls:
        before, after = (mean_over_layers(side.attention_received) for side in (control.before, control.after))
        lines.append(
            f"Control, {describe(control.interventions)}{probes(record)}: position {control.position} goes from "
            f"{before:.2%} to {after:.2%} on average."
        )
    return lines


def probes(record: Effect) -> str:
    """Return in brackets how many sequences scan and controls ran on, nothing where it is all of them."""
    count = record.settings.probes
    return f" ({count} sequence{'s' if count > 1 else ''})" if count < record.settings.sequences else ""


def _received(name: str, place: PositionChange, rows: str) -> str:
    before, after = place.attention_received.before, place.attention_received.after
    (start, most), (end, most_after) = highest(before), highest(after)
    top = start if most > most_after else end
    return (
        f"{name} receives {mean_over_layers(before):.2%} of {rows} attention before and {mean_over_layers(after):.2%} "
        f"after, on average over layers; in layer {top} {before.array[top]:.1%} and {after.array[top]:.1%}."
    )


def _norms(place: PositionChange) -> str:
    hidden, values = place.hidden_norm_ratio, place.value_norm_ratio
    (top, peak), (low, drain) = highest(hidden.after), lowest(values.after)
    return (
        f"Its hidden norm is at most {peak:.3g} times the median of the others (entering layer {top}; "
        f"{hidden.before.array[top]:.3g} before), its value norm as low as {drain:.2f} times (layer {low}; "
        f"{values.before.array[low]:.2f} before)."
    )


def headline(record: Effect) -> dict[str, Any]:
    """Return the figures that the last line of the output holds."""
    main, loss = record.positions[0], record.positions[0].loss_behind
    sides = None if loss is None else {name: round(side.mean, 4) for name, side in loss}

    def both(change: Change, digits: int, figure: Any) -> dict[str, float | None]:
        """Return a figure of the layers before and after; None where no layer has the measure."""

        def rounded(measure: Measure) -> float | None:
            value = figure(measure)
            return None if np.isnan(value) else round(value, digits)

        return {"before": rounded(change.before), "after": rounded(change.after)}

    return {
        "model": record.model.name,
        "interventions": [to_entry(intervention) for intervention in record.interventions],
        "position": main.position,
        "attention_received": both(main.attention_received, 5, mean_over_layers),
        "hidden_norm_ratio_max": both(main.hidden_norm_ratio, 2, lambda ratio: highest(ratio)[1]),
        "value_norm_ratio_min": both(main.value_norm_ratio, 3, lambda ratio: lowest(ratio)[1]),
        "loss_behind": sides,
        "seconds": round(record.seconds, 2),
    }


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
    main, first = record.positions[0], _first_token(record)
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


def _first_token(record: Effect) -> PositionChange | None:
    """Return what was measured at the first token, None where it is itself intervened on."""
    return next((place for place in record.positions if place.role == "first token"), None)


def _shares(place: PositionChange) -> str:
    received = place.attention_received
    return f"{mean_over_layers(received.before):.1%} → {mean_over_layers(received.after):.1%}"


def _panels(record: Effect) -> list[Panel]:
    """Return all figures of the page, in order."""
    sides, main, first = record.attention_by_position, record.positions[0], _first_token(record)
    at, rows = f"position {main.position}", "later tokens" if record.model.causal else "the other tokens"
    sentence = (
        "Mean attention that a position receives from the tokens that may see it, positions on a logarithmic axis. "
        "Bright columns are sinks."
    )
    heats = []
    for side, bins in (("before", sides.before), ("after", sides.after)):
        title, label, scale = f"Attention received by position, {side}", "log₁₀ of the share", (-4.0, 0.0)
        heats.append(position_panel(f"attention_{side}", title, sentence, bins, 1.0, label, scale, main.position))
    title, sentence = f"Attention on {at}", f"Mean attention that {at} receives from {rows}."
    received = [_change("attention_received", title, sentence, RECEIVED, main.attention_received, SHARE)]
    if first is not None:
        title, sentence = (
            "Attention on the first token",
            f"The same for the first token: what it loses where {at} gains.",
        )
        received.append(_change("first_token", title, sentence, RECEIVED, first.attention_received, SHARE))
    ratio = "norm ÷ median of the others"
    peak = f"Hidden state of {at}, entering each layer. A jump marks the layer before it as the maker of a peak."
    drain = f"Value states of {at}. Low where attention is high: attention parked where it does little."
    states = [
        _change("hidden_norm_ratio", "Hidden-state peak", peak, ratio, main.hidden_norm_ratio, NORM),
        _change("value_norm_ratio", "Value drain", drain, ratio, main.value_norm_ratio, NORM),
    ]
    if main.mlp_l1_l2 is not None:
        sentence = f"‖u‖₁ / ‖u‖₂ of what the MLP adds at {at}: near 1 for a single peak, high for a flat vector."
        title, bounds = "Shape of the MLP's output", (1.0, math.sqrt(record.model.hidden_size))
        states.append(_change("mlp_l1_l2", title, sentence, "L1 / L2", main.mlp_l1_l2, bounds))
    shares = same_scale([*received, *_trial_panels(record)])
    return [*heats, *shares[: len(received)], *states, *shares[len(received) :]]


def _change(key: str, title: str, sentence: str, axis: str, change: Change, bounds: tuple[float, float]) -> Panel:
    """Return a figure of a measure by layer, before and after, with bands."""
    lines = [curve(change.before, "before", QUIET), curve(change.after, "after", COLORS[0])]
    return Panel(key, title, sentence, LAYER, axis, lines, log_y=bounds == NORM, bounds=bounds)


def _trial_panels(record: Effect) -> list[Panel]:
    """Return the figures of the scan and of the controls."""
    scan, controls, names = [], [], []
    for trial, color in zip(record.scan, itertools.cycle(COLORS), strict=False):
        name = f"in layers {ranges(trial.layers)}" if trial.layers else "in no layer"
        scan.append(curve(trial.attention_received, name, color, band=False))
    for number, (control, color) in enumerate(zip(record.controls, itertools.cycle(COLORS), strict=False), 1):
        before, after = control.before.attention_received, control.after.attention_received
        controls.append(curve(before, f"control {number}, before", color, band=False, dashed=True))
        controls.append(curve(after, f"control {number}, after", color, band=False))
        names.append(f"{number}: {describe(control.interventions)}")
    at = f"position {record.positions[0].position}"
    where = f"The intervention in some layers only: attention on {at}{probes(record)}."
    what = f"Attention on the position of each control{probes(record)}. {'; '.join(names)}."
    return [
        *_divided("scan", "In which layers it matters", where, scan),
        *_divided("controls", "Controls", what, controls),
    ]


def _divided(key: str, title: str, sentence: str, lines: list[Line]) -> list[Panel]:
    """Return figures of at most `LINES` lines each, evenly filled."""
    figures = math.ceil(len(lines) / LINES)
    step = math.ceil(len(lines) / max(figures, 1))
    panels = []
    for number in range(figures):
        name = key if figures == 1 else f"{key}_{number + 1}"
        panels.append(Panel(name, title, sentence, LAYER, RECEIVED, lines[number * step : (number + 1) * step]))
    return panels

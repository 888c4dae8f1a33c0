"""The sentences, figures, cards and page of an intervention, from its record alone."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosslayer.intervention.record import ByLayer, InterventionRecord, LossBehind, Place
from crosslayer.output.folder import whole_folder
from crosslayer.output.page import Table, measured_on, page, runs, save_page
from crosslayer.output.panel import COLORS, QUIET, Line, Panel, by_position, same_scale
from crosslayer.output.record import Measure

LAYER = "layer"
SHARE = "attention received"
LINES = 4  # of one figure


def write_intervention(record: dict[str, Any], out: Path, force: bool = False) -> Path:
    """Write an intervention to `out`, whole or not at all; return the page's path."""
    checked = InterventionRecord.model_validate(record)
    model, settings = checked.model, checked.settings
    text = measured_on(settings["sequences"], settings["length"], settings.get("text"), settings.get("documents"))
    subtitle = f"{describe(checked.interventions)} · {text}"
    figures = panels(checked)
    with whole_folder(out, force) as folder:
        title = f"Intervention on {settings.get('model') or model['class']}"
        text = page(title, subtitle, cards(checked), words(checked), figures, tables(checked))
        save_page(folder, text, record, figures)
    return out / "report.html"


def describe(interventions: list[dict[str, Any]]) -> str:
    """Return interventions in words: waiver (positions 255) + token_swap (position 0, token bos)."""
    return " + ".join(f"{one['kind']} ({_options(one)})" for one in interventions)


def _options(one: dict[str, Any]) -> str:
    shown = []
    for key, value in one.items():
        if key == "kind" or (key, value) == ("layers", "all"):
            continue
        if isinstance(value, list | tuple):
            key = key.removesuffix("s") if len(value) == 1 else key
            value = runs(value) if all(isinstance(x, int) for x in value) else f"a vector of {len(value)}"
        shown.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(shown)


def words(record: InterventionRecord) -> list[str]:
    """Return what was found, in sentences."""
    rows = "later tokens'" if record.model["causal"] else "the other tokens'"
    made = [_received(f"Position {record.position}", record, rows)]
    peak, drain = record.hidden_norm_ratio, record.value_norm_ratio
    top, low = _argmax(peak.after.mean), _argmax([None if v is None else -v for v in drain.after.mean])
    made.append(
        f"Its hidden norm is at most {peak.after.mean[top]:.3g} times the median of the others (entering layer "
        f"{top}; {peak.before.mean[top]:.3g} before), its value norm as low as {drain.after.mean[low]:.2f} times "
        f"(layer {low}; {drain.before.mean[low]:.2f} before)."
    )
    if record.loss_behind is not None:
        made.append(f"Behind it the model's loss {_loss(record.loss_behind)}.")
    for other in record.others:
        if other.role != "left alone":
            name = "The first token" if other.role == "first token" else f"Position {other.position}"
            made.append(_received(name, other, rows))
    alone = [other for other in record.others if other.role == "left alone"]
    if alone:
        most = max(_top(other.attention_received.after) for other in alone)
        listed = " and ".join(str(other.position) for other in alone)
        who = f"positions {listed} in no layer receive" if len(alone) > 1 else f"position {listed} in no layer receives"
        made.append(f"Left alone: {who} more than {most:.1%} under the intervention.")
    if record.scan:
        tried = [f"{_range(one)} {_mean(one['attention_received']['mean']):.1%}" for one in record.scan]
        made.append(f"By the layers in which it acts{_few(record)}: {'; '.join(tried)}, on average over all layers.")
    for one in record.controls:
        before, after = (one[side]["attention_received"]["mean"] for side in ("before", "after"))
        made.append(
            f"Control, {describe(one['interventions'])}{_few(record)}: position {one['position']} goes from "
            f"{_mean(before):.2%} to {_mean(after):.2%} on average."
        )
    return made


def _range(one: dict[str, Any]) -> str:
    return runs(one["layers"]) or "none"


def _few(record: InterventionRecord) -> str:
    count = record.settings["probes"]
    return f" ({count} sequence{'s' if count > 1 else ''})" if count < record.settings["sequences"] else ""


def _received(name: str, place: Place, rows: str) -> str:
    found = place.attention_received
    both = zip(found.before.mean, found.after.mean, strict=True)
    top = _argmax([None if a is None or b is None else max(a, b) for a, b in both])
    return (
        f"{name} receives {_mean(found.before.mean):.2%} of {rows} attention before and {_mean(found.after.mean):.2%} "
        f"after, on average over layers; in layer {top} {found.before.mean[top]:.1%} and {found.after.mean[top]:.1%}."
    )


def _loss(found: LossBehind) -> str:
    change = found.difference
    interval = "one sequence, no interval" if change.ci95 is None else f"{change.ci95[0]:+.4f} to {change.ci95[1]:+.4f}"
    return f"goes from {found.before.mean:.4f} to {found.after.mean:.4f} nats a token: {change.mean:+.4f} ({interval})"


def headline(record: InterventionRecord) -> dict[str, Any]:
    """Return the figures that the last line of the output holds."""
    received, peak, drain = record.attention_received, record.hidden_norm_ratio, record.value_norm_ratio
    loss = record.loss_behind
    return {
        "interventions": record.interventions,
        "position": record.position,
        "attention_received": _both(received, lambda values: round(sum(values) / len(values), 5)),
        "hidden_norm_ratio_max": _both(peak, lambda values: round(max(values), 2)),
        "value_norm_ratio_min": _both(drain, lambda values: round(min(values), 3)),
        "loss_behind": None
        if loss is None
        else {
            "before": round(loss.before.mean, 4),
            "after": round(loss.after.mean, 4),
            "difference": round(loss.difference.mean, 4),
        },
        "seconds": round(record.seconds, 2),
    }


def _both(found: ByLayer, figure: Callable[[list[float]], float]) -> dict[str, float]:
    """Return one figure of the layers that have a value, before and after."""
    return {"before": figure(_known(found.before.mean)), "after": figure(_known(found.after.mean))}


def cards(record: InterventionRecord) -> list[tuple[str, str, str]]:
    """Return the headline cards: title, figure, explanation."""
    received, peak = record.attention_received, record.hidden_norm_ratio
    before, after = _mean(received.before.mean), _mean(received.after.mean)
    made = [
        (
            f"Attention on {record.position}",
            f"{before:.1%} → {after:.1%}",
            "received from other tokens, mean over layers",
        ),
        (
            f"Hidden norm of {record.position}",
            f"{_top(peak.before):.3g} → {_top(peak.after):.3g}×",
            "the median of the others, in its highest layer",
        ),
    ]
    for other in record.others:
        if other.role == "first token":
            sides = [_mean(m.mean) for m in (other.attention_received.before, other.attention_received.after)]
            made.append(("Attention on the first token", f"{sides[0]:.1%} → {sides[1]:.1%}", "mean over layers"))
    if record.loss_behind is not None:
        change = record.loss_behind.difference
        span = "one sequence" if change.ci95 is None else f"95 %: {change.ci95[0]:+.3f} to {change.ci95[1]:+.3f}"
        made.append(("Loss behind it", f"{change.mean:+.3f}", f"nats a token; {span}"))
    return made


def panels(record: InterventionRecord) -> list[Panel]:
    """Return all figures of the page, in order."""
    heats, received = [_heat(record, side) for side in ("before", "after")], _received_panels(record)
    shares = same_scale([*received, *_tried_panels(record)])
    return [*heats, *shares[: len(received)], *_state_panels(record), *shares[len(received) :]]


def _received_panels(record: InterventionRecord) -> list[Panel]:
    """Return the attention that the position receives, and the first token beside it."""
    at, rows = f"position {record.position}", "later tokens" if record.model["causal"] else "the other tokens"
    words, bounds = f"Mean attention that {at} receives from {rows}.", (0.0, 1.0)
    made = [_sides("attention_received", f"Attention on {at}", words, SHARE, record.attention_received, bounds)]
    for other in record.others:
        if other.role == "first token":
            words, title = (
                f"The same for the first token: what it loses where {at} gains.",
                "Attention on the first token",
            )
            made.append(_sides("first_token", title, words, SHARE, other.attention_received, bounds))
    return made


def _state_panels(record: InterventionRecord) -> list[Panel]:
    """Return the norms of the position's states, and the shape of what the MLP adds to it."""
    at, ratio, norm = f"position {record.position}", "norm ÷ median of the others", (0.0, math.inf)
    words = f"Hidden state of {at}, entering each layer. A jump marks the layer before it as the one that makes a peak."
    made = [_sides("hidden_norm_ratio", "Hidden-state peak", words, ratio, record.hidden_norm_ratio, norm)]
    words = f"Value states of {at}. Low where attention is high: attention parked where it does little."
    made.append(_sides("value_norm_ratio", "Value drain", words, ratio, record.value_norm_ratio, norm))
    if record.mlp_l1_l2 is not None:
        words = f"‖u‖₁ / ‖u‖₂ of what the MLP adds at {at}: near 1 for a single peak, high for a flat vector."
        bounds = (1.0, math.sqrt(record.model["hidden_size"]))
        made.append(_sides("mlp_l1_l2", "Shape of the MLP's output", words, "L1 / L2", record.mlp_l1_l2, bounds))
    return made


def _tried_panels(record: InterventionRecord) -> list[Panel]:
    """Return what the intervention does in some layers only, and what the controls do."""
    scanned = []
    for i, one in enumerate(record.scan):
        mean, name = (
            one["attention_received"]["mean"],
            f"in layers {runs(one['layers'])}" if one["layers"] else "in no layer",
        )
        scanned.append(Line(name, _numbers(mean), mean, color=COLORS[i % len(COLORS)]))
    words = f"The intervention in some layers only: attention on position {record.position}{_few(record)}."
    made = _many("scan", "In which layers it matters", words, scanned)
    controls = []
    for i, one in enumerate(record.controls):
        for side in ("before", "after"):
            mean = one[side]["attention_received"]["mean"]
            color, dashed = COLORS[i % len(COLORS)], side == "before"
            controls.append(Line(f"control {i + 1}, {side}", _numbers(mean), mean, color=color, dashed=dashed))
    named = "; ".join(f"{i + 1}: {describe(one['interventions'])}" for i, one in enumerate(record.controls))
    words = f"Attention on the position of each control{_few(record)}. {named}."
    return made + _many("controls", "Controls", words, controls)


def _many(key: str, title: str, words: str, lines: list[Line]) -> list[Panel]:
    """Return figures of at most `LINES` lines each, evenly filled."""
    made, figures = [], math.ceil(len(lines) / LINES)
    step = math.ceil(len(lines) / max(figures, 1))
    for start in range(0, len(lines), max(step, 1)):
        name = key if figures == 1 else f"{key}_{start // step + 1}"
        made.append(Panel(name, title, words, LAYER, SHARE, lines[start : start + step]))
    return made


def _sides(key: str, title: str, words: str, axis: str, found: ByLayer, bounds: tuple[float, float]) -> Panel:
    lines = [_line("before", found.before, QUIET), _line("after", found.after, COLORS[0])]
    return Panel(key, title, words, LAYER, axis, lines, log_y=key.endswith("norm_ratio"), bounds=bounds)


def _line(name: str, found: Measure, color: str) -> Line:
    low, high = (None if found.ci95 is None else [pair[end] for pair in found.ci95] for end in (0, 1))
    return Line(name, _numbers(found.mean), found.mean, low, high, color)


def _heat(record: InterventionRecord, side: str) -> Panel:
    found = record.attention_by_position
    z = [[None if v is None else math.log10(max(v, 1e-4)) for v in row] for row in found[side]]
    drawn = by_position(found["edges"], found["length"], z, "log₁₀ of the share", (-4.0, 0.0), record.position)
    words = (
        "Mean attention that a position receives from the tokens that may see it, positions on a logarithmic axis. "
        "Bright columns are sinks."
    )
    title, axis = f"Attention received by position, {side}", "position (0 = first token)"
    return Panel(f"attention_{side}", title, words, axis, LAYER, wide=True, **drawn)


def tables(record: InterventionRecord) -> list[Table]:
    """Return the table of settings and versions."""
    versions = {f"{key} version": value for key, value in record.environment["versions"].items()}
    settings = {**record.model, **record.settings, **versions, **record.environment["machine"]}
    settings |= {"seconds": f"{record.seconds:.1f}"}
    rows: list[list[str | list[str]]] = [[key.replace("_", " "), str(value)] for key, value in settings.items()]
    return [("Settings and versions", ["setting", "value"], rows)]


def _numbers(values: list[Any]) -> list[float]:
    return [float(i) for i in range(len(values))]


def _known(values: list[Any]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: list[Any]) -> float:
    known = _known(values)
    return sum(known) / len(known)


def _top(found: Measure | dict[str, Any]) -> float:
    return max(_known(found["mean"] if isinstance(found, dict) else found.mean))


def _argmax(values: list[Any]) -> int:
    return max((i for i, value in enumerate(values) if value is not None), key=lambda i: values[i])

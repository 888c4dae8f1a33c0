"""An intervention in words and in a few figures, from its record alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from crosslayer.output.words import ranges
from crosslayer.verbs.intervene.kinds import Kind, to_entry
from crosslayer.verbs.intervene.record import Change, Control, LayerMeasure, LossChange, Place, Trial
from crosslayer.verbs.intervene.result import Effect


def describe(interventions: Sequence[Kind]) -> str:
    """Return interventions in words: waiver (positions 255) + token_swap (position 0, token bos)."""
    return " + ".join(f"{intervention.kind} ({_options(intervention)})" for intervention in interventions)


def _options(intervention: Kind) -> str:
    shown = []
    for name, option in to_entry(intervention).items():
        if name == "kind" or (name, option) == ("layers", "all"):
            continue
        if isinstance(option, tuple):
            name = name.removesuffix("s") if len(option) == 1 else name
            whole = all(isinstance(number, int) for number in option)
            option = ranges(option) if whole else f"a vector of {len(option)}"
        shown.append(f"{name.replace('_', ' ')} {option}")
    return ", ".join(shown)


def sentences(record: Effect) -> list[str]:
    """Return what was measured, in sentences."""
    main, *others = record.places
    rows = "later tokens'" if record.model.causal else "the other tokens'"
    lines = [_received(f"Position {main.position}", main, rows), _norms(main)]
    if main.loss_behind is not None:
        lines.append(f"Behind it the model's loss {_loss(main.loss_behind)}.")
    for other in others:
        if other.role != "left alone":
            name = "The first token" if other.role == "first token" else f"Position {other.position}"
            lines.append(_received(name, other, rows))
    alone = [other for other in others if other.role == "left alone"]
    if alone:
        lines.append(_left_alone(alone))
    if record.scan:
        tried = "; ".join(_trial(trial) for trial in record.scan)
        lines.append(f"By the layers in which it acts{probes(record)}: {tried}, on average over all layers.")
    return lines + [_control(control, probes(record)) for control in record.controls]


def probes(record: Effect) -> str:
    """Return in brackets how many sequences scan and controls ran on, nothing where it is all of them."""
    count = record.settings.probes
    return f" ({count} sequence{'s' if count > 1 else ''})" if count < record.settings.sequences else ""


def _received(name: str, place: Place, rows: str) -> str:
    before, after = place.attention_received.before.mean, place.attention_received.after.mean
    larger = []
    for start, end in zip(before, after, strict=True):
        larger.append(None if start is None or end is None else max(start, end))
    top = _argmax(larger)
    return (
        f"{name} receives {mean_of(before):.2%} of {rows} attention before and {mean_of(after):.2%} after, on average "
        f"over layers; in layer {top} {_number(before[top]):.1%} and {_number(after[top]):.1%}."
    )


def _norms(place: Place) -> str:
    hidden, values = place.hidden_norm_ratio, place.value_norm_ratio
    top = _argmax(hidden.after.mean)
    low = _argmax([None if ratio is None else -ratio for ratio in values.after.mean])
    peak = [_number(side.mean[top]) for side in (hidden.before, hidden.after)]
    drain = [_number(side.mean[low]) for side in (values.before, values.after)]
    return (
        f"Its hidden norm is at most {peak[1]:.3g} times the median of the others (entering layer {top}; {peak[0]:.3g} "
        f"before), its value norm as low as {drain[1]:.2f} times (layer {low}; {drain[0]:.2f} before)."
    )


def _loss(loss: LossChange) -> str:
    change = loss.difference
    interval = (
        "a single sequence, no interval" if change.ci95 is None else f"{change.ci95[0]:+.4f} to {change.ci95[1]:+.4f}"
    )
    return f"goes from {loss.before.mean:.4f} to {loss.after.mean:.4f} nats a token: {change.mean:+.4f} ({interval})"


def _left_alone(places: list[Place]) -> str:
    most = max(top_of(place.attention_received.after) for place in places)
    listed = " and ".join(str(place.position) for place in places)
    who = f"positions {listed} in no layer receive" if len(places) > 1 else f"position {listed} in no layer receives"
    return f"Left alone: {who} more than {most:.1%} under the intervention."


def _trial(trial: Trial) -> str:
    return f"{ranges(trial.layers) or 'none'} {mean_of(trial.attention_received.mean):.1%}"


def _control(control: Control, probes: str) -> str:
    before, after = (mean_of(side.attention_received.mean) for side in (control.before, control.after))
    return (
        f"Control, {describe(control.interventions)}{probes}: position {control.position} goes from {before:.2%} to "
        f"{after:.2%} on average."
    )


def headline(record: Effect) -> dict[str, Any]:
    """Return the figures that the last line of the output holds."""
    main = record.places[0]
    loss = main.loss_behind
    return {
        "model": record.settings.model,
        "interventions": [to_entry(intervention) for intervention in record.interventions],
        "position": main.position,
        "attention_received": _both(main.attention_received, lambda shares: round(sum(shares) / len(shares), 5)),
        "hidden_norm_ratio_max": _both(main.hidden_norm_ratio, lambda ratios: round(max(ratios), 2)),
        "value_norm_ratio_min": _both(main.value_norm_ratio, lambda ratios: round(min(ratios), 3)),
        "loss_behind": None
        if loss is None
        else {
            "before": round(loss.before.mean, 4),
            "after": round(loss.after.mean, 4),
            "difference": round(loss.difference.mean, 4),
        },
        "seconds": round(record.seconds, 2),
    }


def _both(change: Change, figure: Callable[[list[float]], float]) -> dict[str, float | None]:
    """Return a figure of the layers that have the measure, before and after; None where no layer has it."""
    before, after = _known(change.before.mean), _known(change.after.mean)
    return {"before": figure(before) if before else None, "after": figure(after) if after else None}


def mean_of(shares: list[float | None]) -> float:
    """Return the mean over the layers that have the measure, NaN where none has it."""
    known = _known(shares)
    return sum(known) / len(known) if known else math.nan


def top_of(measure: LayerMeasure) -> float:
    """Return the largest mean of all layers, NaN where none has the measure."""
    return max(_known(measure.mean), default=math.nan)


def _known(means: list[float | None]) -> list[float]:
    return [mean for mean in means if mean is not None]


def _argmax(means: list[float | None]) -> int:
    """Return the layer with the largest mean, the first where no layer has the measure."""
    known = {layer: mean for layer, mean in enumerate(means) if mean is not None}
    return max(known, key=lambda layer: known[layer], default=0)


def _number(mean: float | None) -> float:
    """Return a mean as a number to print."""
    return math.nan if mean is None else mean

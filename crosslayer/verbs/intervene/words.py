"""An intervention in words and in a few figures, from its record alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crosslayer.output.record import Measure
from crosslayer.output.words import listed, ranges, signed, signed_interval
from crosslayer.verbs.diagnose.curves import highest, lowest, mean_over_layers
from crosslayer.verbs.intervene.kinds import Kind, to_entry
from crosslayer.verbs.intervene.record import Change, Place
from crosslayer.verbs.intervene.result import Effect


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
    main, *others = record.places
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


def _received(name: str, place: Place, rows: str) -> str:
    before, after = place.attention_received.before, place.attention_received.after
    (start, most), (end, most_after) = highest(before), highest(after)
    top = start if most > most_after else end
    return (
        f"{name} receives {mean_over_layers(before):.2%} of {rows} attention before and {mean_over_layers(after):.2%} "
        f"after, on average over layers; in layer {top} {before.array[top]:.1%} and {after.array[top]:.1%}."
    )


def _norms(place: Place) -> str:
    hidden, values = place.hidden_norm_ratio, place.value_norm_ratio
    (top, peak), (low, drain) = highest(hidden.after), lowest(values.after)
    return (
        f"Its hidden norm is at most {peak:.3g} times the median of the others (entering layer {top}; "
        f"{hidden.before.array[top]:.3g} before), its value norm as low as {drain:.2f} times (layer {low}; "
        f"{values.before.array[low]:.2f} before)."
    )


def headline(record: Effect) -> dict[str, Any]:
    """Return the figures that the last line of the output holds."""
    main, loss = record.places[0], record.places[0].loss_behind
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

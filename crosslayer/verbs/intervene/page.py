"""The page and the sentences of an intervention, built from its record alone."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from crosslayer.output.chart import same_scale
from crosslayer.output.formatting import listed, ranges
from crosslayer.output.page import Page
from crosslayer.output.panel import COLORS, QUIET, Line, Panel
from crosslayer.output.record import Measure
from crosslayer.stats.estimate import Estimate
from crosslayer.verbs.diagnose.curves import (
    LAST_ROW,
    LAYER,
    NORM,
    SHARE,
    curve,
    facts_table,
    head_panel,
    highest,
    lowest,
    mean_over_layers,
    measured_on,
    position_panel,
)
from crosslayer.verbs.intervene.kinds import Kind, to_entry
from crosslayer.verbs.intervene.result import Change, Effect, PositionChange

RECEIVED = "attention received"
MOVED = 0.05  # a gain of attention, mean over layers, that makes another position worth a sentence


def describe(interventions: Sequence[Kind]) -> str:
    """Return interventions in words: waiver (position 255) + token_swap (position 0, token bos)."""
    descriptions = []
    for intervention in interventions:
        options = []
        for name, option in to_entry(intervention).items():
            if name == "kind" or option is None or (name, option) == ("layers", "all"):
                continue
            if isinstance(option, tuple):
                name = name.removesuffix("s") if len(option) == 1 else name
                option = ranges(option)
            options.append(f"{name.replace('_', ' ')} {option}")
        descriptions.append(f"{intervention.kind} ({', '.join(options)})")
    return " + ".join(descriptions)


def sentences(record: Effect) -> list[str]:
    """Return the effect in sentences: the main position, then other positions, the scan and the controls."""
    main, *others = record.positions
    givers = "later tokens'" if record.model.causal else "the other tokens'"
    probed = record.settings.probed
    lines = [_received(f"Position {main.position}", main, givers)]
    hidden, values = main.hidden_norm_ratio, main.value_norm_ratio
    (top, peak), (low, drain) = highest(hidden.after), lowest(values.after)
    sentence = (
        f"Its hidden-state norm is at most {peak:.3g}× the median of the other tokens (at the input of layer {top}; "
        f"before: {hidden.before.array()[top]:.3g}×)"
    )
    if math.isnan(drain):
        sentence += "; its value norm cannot be compared, since the median of the other tokens is zero."
    else:
        before = values.before.array()[low]
        sentence += f", and its value norm at least {drain:.2f}× (layer {low}; before: {before:.2f}×)."
    lines.append(sentence)
    if main.loss_behind is not None:
        loss = main.loss_behind
        lines.append(
            f"The loss on later tokens changes by {_signed(loss.difference, 4)} nats per token: "
            f"{loss.before.mean:.4f} → {loss.after.mean:.4f}."
        )
    for other in others:
        if other.role != "left alone":
            name = "The first token" if other.role == "first token" else f"Position {other.position}"
            lines.append(_received(name, other, givers))
    lines += _elsewhere(record)
    untouched = [other for other in others if other.role == "left alone"]
    if untouched:
        names = listed([str(position.position) for position in untouched])
        most = max(highest(position.attention_received.after)[1] for position in untouched)
        subject = f"positions {names} receive" if len(untouched) > 1 else f"position {names} receives"
        lines.append(f"Control {subject} at most {most:.1%} of attention in any layer after the intervention.")
    if record.scan:
        means = [(ranges(trial.layers) or "none", mean_over_layers(trial.attention_received)) for trial in record.scan]
        trials = "; ".join(f"{layers} {mean:.1%}" for layers, mean in means)
        lines.append(
            f"Attention on position {main.position} if the intervention acts in some layers only (mean over "
            f"layers{probed}): {trials}."
        )
    for control in record.controls:
        before, after = (mean_over_layers(reading.attention_received) for reading in (control.before, control.after))
        lines.append(
            f"Control, {describe(control.interventions)}: position {control.position} receives {before:.2%} of "
            f"attention before and {after:.2%} after (mean over layers{probed})."
        )
    return lines


def _signed(change: Measure, digits: int) -> str:
    """Return a change that has no layers, with its interval."""
    low, high = change.ci95 or (None, None)
    how = "bootstrap" if change.over == "documents" else "Student's t"
    estimate = Estimate(value=change.mean, low=low, high=high, n=change.n, over=change.over, how=how)
    return estimate.text(digits, signed=True)


def _received(name: str, change: PositionChange, givers: str) -> str:
    before, after = change.attention_received.before, change.attention_received.after
    (start, most), (end, most_after) = highest(before), highest(after)
    top = start if most > most_after else end
    return (
        f"{name} receives {mean_over_layers(before):.2%} of {givers} attention before the intervention and "
        f"{mean_over_layers(after):.2%} after (mean over layers; layer {top}: {before.array()[top]:.1%} → "
        f"{after.array()[top]:.1%})."
    )


def layout(record: Effect) -> Page:
    """Return the parts of the page."""
    main, cards = record.main, []
    named = {f"position {main.position}": main, "the first token": record.first_token}
    for name, change in named.items():
        if change is not None:
            received = change.attention_received
            shares = f"{mean_over_layers(received.before):.1%} → {mean_over_layers(received.after):.1%}"
            note = "from other tokens, mean over layers" if change is main else "mean over layers"
            cards.append((f"Attention on {name}", shares, note))
    before, after = (highest(norms)[1] for norms in (main.hidden_norm_ratio.before, main.hidden_norm_ratio.after))
    note = "the median of the other tokens, largest over layers"
    cards.insert(1, (f"Hidden-state norm of position {main.position}", f"{before:.3g} → {after:.3g}×", note))
    if main.loss_behind is not None:
        loss = _signed(main.loss_behind.difference, 3)
        cards.append(("Loss on later tokens", loss, "nats per token, 95% CI"))
    text = measured_on(record.settings, main.attention_received.before.over)
    return Page(
        title=f"Intervention on {record.model.name}",
        subtitle=f"{describe(record.interventions)} · {text}",
        cards=cards,
        panels=_panels(record),
        tables=[facts_table(record.model.model_dump(by_alias=True))],
    )


def _elsewhere(record: Effect) -> list[str]:
    """Return where attention went, if it made another position than those of the intervention a sink.

    Where nothing may attend to token 0, for example, token 1 attends to itself alone, and takes its place.
    """
    before, after = record.attention_by_position.before, record.attention_by_position.after
    means = [np.mean(np.array(bins.mean, float), 0) for bins in (before, after)]  # over layers, of each bin
    ends = [*after.edges[1:], after.length]
    known = {position.position for position in record.positions}
    alone = [
        (means[1][index] - means[0][index], index)
        for index, (start, end) in enumerate(zip(after.edges, ends, strict=True))
        if end == start + 1 and start not in known
    ]
    gain, index = max(alone, default=(0.0, 0))
    if not gain > MOVED:
        return []
    where = f"Position {after.edges[index]} takes attention instead"
    return [f"{where}: {means[0][index]:.2%} before and {means[1][index]:.2%} after (mean over layers)."]


def _panels(record: Effect) -> list[Panel]:
    """Return all figures of the page, in order."""
    main, first = record.main, record.first_token
    at = f"position {main.position}"
    givers = "later tokens" if record.model.causal else "the other tokens"
    heats, scale = [], (1.0, "log₁₀ of the share", (-4.0, 0.0), main.position)
    sentence = "Mean attention that a position receives from tokens that can attend to it. Bright columns are sinks."
    for when, bins in record.attention_by_position:
        heats.append(position_panel(f"attention_{when}", f"Attention by position, {when}", sentence, bins, *scale))
    title, sentence = LAST_ROW
    for when, bins in record.last_row_by_position:
        heats.append(position_panel(f"last_row_{when}", f"{title}, {when}", sentence, bins, *scale))
    heats.append(head_panel("attention_by_head", main.attention_by_head.after, f"{at} after the intervention"))
    title, sentence = f"Attention on {at}", f"Mean attention that {at} receives from {givers}."
    received = [_change("attention_received", title, sentence, RECEIVED, main.attention_received, SHARE)]
    if first is not None:
        token = "the first token after the intervention"
        heats.append(head_panel("first_token_by_head", first.attention_by_head.after, token))
        title = "Attention on the first token"
        sentence = f"The same for the first token, which loses attention if {at} gains some."
        received.append(_change("first_token", title, sentence, RECEIVED, first.attention_received, SHARE))
    ratio = "norm ÷ median of the others"
    peak = f"Hidden state of {at} at the input of each layer. The layer before a jump writes a massive activation."
    drain = f"Values of {at}. Where they are small and attention is high, that attention adds little."
    states = [
        _change("hidden_norm_ratio", "Norm of the hidden state", peak, ratio, main.hidden_norm_ratio, NORM),
        _change("value_norm_ratio", "Norm of the values", drain, ratio, main.value_norm_ratio, NORM),
    ]
    if main.mlp_l1_l2 is not None:
        sentence = (
            f"L1 over L2 norm of the MLP's output at {at}: near 1 for a few huge channels, high for a flat vector."
        )
        title, bounds = "Flatness of the MLP's output", (1.0, math.sqrt(record.model.hidden_size))
        states.append(_change("mlp_l1_l2", title, sentence, "L1 / L2", main.mlp_l1_l2, bounds))

    # Fig. 3 and 4 of the paper
    row = record.last_row_of_head
    title = f"The last token's attention in head {row.head} of layer {row.layer}"
    sentence = f"The head in which its attention to position {main.position} changes most. Mean over sequences."
    x = [float(position) for position in range(len(row.before))]
    lines = [Line("before", x, row.before, color=QUIET), Line("after", x, row.after, color=COLORS[0])]
    head = Panel("last_row_of_head", title, sentence, "position", "share of attention", lines, wide=True, bounds=SHARE)

    # attention before and after, within layers and at controls is compared by eye
    shares = same_scale([*received, *_trial_panels(record)])
    return [*shares[: len(received)], head, *states, *shares[len(received) :], *heats]


def _change(key: str, title: str, sentence: str, axis: str, change: Change, bounds: tuple[float, float]) -> Panel:
    """Return a figure of a measure by layer, before and after, with intervals as bands."""
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
    at = f"position {record.main.position}"
    within = f"Attention on {at} if the intervention acts in some layers only{record.settings.probed}."
    elsewhere = f"Attention on the position of each control{record.settings.probed}. {'; '.join(names)}."
    panels = [
        Panel("scan", "Which layers matter", within, LAYER, RECEIVED, scan),
        Panel("controls", "Controls", elsewhere, LAYER, RECEIVED, controls),
    ]
    return [panel for panel in panels if panel.lines]

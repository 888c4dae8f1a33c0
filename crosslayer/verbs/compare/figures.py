"""The figures of a comparison: curves, at most six variants in each, then the differences."""

from collections.abc import Mapping, Sequence

import numpy as np

from crosslayer.output.panel import COLORS, QUIET, Dots, Line, Panel, same_scale
from crosslayer.verbs.compare.record import COSTS, ComparedRun, Law, Setting
from crosslayer.verbs.compare.result import Comparison
from crosslayer.verbs.compare.words import titled

TOGETHER = 6  # lines of variants in a figure
LOSS, SEEN = "nats a token", "Mean over seeds, on a few held-out windows."
CURVES = {  # title, sentence and axis of each quantity by step
    "training_loss": ("Training loss", "Mean over seeds; each point is the mean since the point before.", LOSS),
    "validation_loss": (
        "Validation loss",
        "Held-out text, its domains weighted as in training; mean over seeds.",
        LOSS,
    ),
    "first_token": ("Attention on the first token", SEEN, "share, mean over layers"),
    "sink_rate": ("Sink rate", SEEN, "share of heads, mean over layers"),
    "stream_growth": ("Growth of the stream", SEEN, "norm at the last layer / at the first"),
}


def drawn_panels(record: Comparison) -> list[Panel]:
    """Return all figures, setting by setting."""
    panels: list[Panel] = []
    for number, setting in enumerate(record.settings):
        suffix = "" if len(record.settings) == 1 else f"_{number}"
        panels += [*_differences(record, setting, suffix), *_relative(record, setting, suffix)]
        panels += _curves(record, setting, suffix)
    return [*panels, *_laws(record)]


def _differences(record: Comparison, setting: Setting, suffix: str) -> list[Panel]:
    """Return the differences of the final loss, a variant a row, the lowest on top."""
    results = [(part.variant, part.final) for part in record.outcomes if part.setting == setting.label]
    finals = sorted(
        ((variant, final) for variant, final in results if final is not None), key=lambda part: part[1].mean
    )
    if not finals:
        return []
    intervals = [final.interval or (None, None) for _, final in finals]
    dots = Dots(
        names=[variant for variant, _ in finals],
        x=[final.mean for _, final in finals],
        low=[low for low, _ in intervals],
        high=[high for _, high in intervals],
        single=[final.values for _, final in finals],
    )
    words = (
        f"Held-out loss less that of {record.baseline}: left of 0 is lower. Large: mean over pairs of runs, with its "
        "95 % interval where there are three; small: the pairs."
    )
    title = titled("Difference at the end", setting.label)
    return [Panel(f"difference{suffix}", title, words, "nats a token", "", dots=dots)]


def _relative(record: Comparison, setting: Setting, suffix: str) -> list[Panel]:
    curves = {part.variant: part.curve for part in record.outcomes if part.setting == setting.label}
    groups, over = [], 0
    for group in _groups(record, setting):
        lines = []
        for variant, color in zip(group, COLORS, strict=False):
            curve = curves.get(variant)
            if curve is not None:
                over = over or round(curve.window * curve.steps[-1] / len(curve.steps))
                lines.append(Line(variant, [*map(float, curve.steps)], curve.mean, curve.low, curve.high, color))
        groups.append(lines)
    words = (
        f"Training loss, smoothed over {over:,} steps, less that of {record.baseline} with the same seed: below 0 is "
        "lower. Bands: 95 % intervals over seeds, of two seeds both curves."
    )
    return _panels(f"relative_loss{suffix}", "Relative training loss", setting, words, "nats a token", groups)


def _curves(record: Comparison, setting: Setting, suffix: str) -> list[Panel]:
    """Return quantities by step, means over seeds, the baseline in each figure."""
    measured = {variant: [_by_step(run) for run in record.of(setting.label, variant)] for variant in record.ordered}
    panels = []
    for key, (title, words, axis) in CURVES.items():
        groups = []
        for group in _groups(record, setting):
            colors = {record.baseline: QUIET, **dict(zip(group, COLORS, strict=False))}
            lines = [
                _mean_line(variant, [run[key] for run in measured[variant]], color) for variant, color in colors.items()
            ]
            groups.append([line for line in lines if line is not None])
        panels += _panels(f"{key}{suffix}", title, setting, words, axis, groups)
    return panels


def _by_step(run: ComparedRun) -> dict[str, Mapping[int, float | None]]:
    return {
        "training_loss": dict(zip(run.curve.steps, run.curve.losses, strict=True)),
        "validation_loss": dict(zip(run.validation.steps, run.validation.losses, strict=True)),
        "first_token": {seen.step: seen.first_token_share for seen in run.snapshots},
        "sink_rate": {seen.step: seen.sink_rate for seen in run.snapshots},
        "stream_growth": {seen.step: seen.stream_growth for seen in run.snapshots},
    }


def _groups(record: Comparison, setting: Setting) -> list[list[str]]:
    """Return the variants beside the baseline that have runs, so many as stand in a figure."""
    others = [variant for variant in record.ordered[1:] if record.of(setting.label, variant)]
    return [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)]


def _mean_line(name: str, curves: Sequence[Mapping[int, float | None]], color: str) -> Line | None:
    """Return the mean of curves at the steps where all have a value; None where these are fewer than two."""
    means = {}
    for step in curves[0] if curves else ():
        values = [value for curve in curves if (value := curve.get(step)) is not None]
        if len(values) == len(curves):
            means[float(step)] = float(np.mean(values))
    return Line(name, [*means], [*means.values()], color=color) if len(means) > 1 else None


def _panels(
    key: str, title: str, setting: Setting, words: str, axis: str, groups: Sequence[Sequence[Line]]
) -> list[Panel]:
    """Return a figure for each group of lines, of one scale."""
    drawn = [group for group in groups if group]
    panels = []
    for number, lines in enumerate(drawn):
        part, end = (f" ({number + 1} of {len(drawn)})", f"_part_{number}") if len(drawn) > 1 else ("", "")
        panels.append(Panel(f"{key}{end}", titled(f"{title}{part}", setting.label), words, "step", axis, lines))
    return same_scale(panels)


def _laws(record: Comparison) -> list[Panel]:
    """Return the final losses by cost, the baseline in each figure, for each group of settings that has laws."""
    panels: list[Panel] = []
    words = "Means over seeds, against the whole cost of a run; a power law is a straight line here."
    for (where, cost), (first, *others) in record.law_groups().items():
        for start in range(0, len(others), TOGETHER):
            group = zip(others[start : start + TOGETHER], COLORS, strict=False)
            lines = [_law_line(first, QUIET), *(_law_line(law, color) for law, color in group)]
            title = titled(f"Final loss by {COSTS[cost]}", where)
            axes = {"x_title": COSTS[cost], "y_title": "nats a token", "log_x": True, "log_y": True}
            panels.append(Panel(f"scaling_{len(panels)}", title, words, lines=lines, **axes))
    return panels


def _law_line(law: Law, color: str) -> Line:
    costs, losses = zip(*sorted(zip(law.costs, law.losses, strict=True)), strict=True)
    return Line(law.variant, costs, losses, color=color)

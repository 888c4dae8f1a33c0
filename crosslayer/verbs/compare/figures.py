"""The figures of a comparison: differences of the final loss, then curves with at most six variants in each."""

from collections.abc import Mapping, Sequence

import numpy as np

from crosslayer.output.chart import same_scale
from crosslayer.output.panel import COLORS, QUIET, Dots, Heat, Line, Panel
from crosslayer.stats.estimate import band
from crosslayer.verbs.compare.result import COSTS, Comparison, Configuration
from crosslayer.verbs.compare.sentences import titled

TOGETHER = 6  # lines of variants in a figure
Groups = list[list[str]]  # variants, by figure
LOSS, SNAPSHOT = "nats per token", "Mean over seeds, on a few held-out windows."
LATER = "Of attention and MLPs from the second layer on."
CURVES = {  # quantity → title, caption and axis
    "training_loss": ("Training loss", "Mean over seeds; each point is the mean since the previous one.", LOSS),
    "validation_loss": ("Validation loss", "Held-out text, domains weighted as in training; mean over seeds.", LOSS),
    "first_token_share": ("Attention on the first token", SNAPSHOT, "share, mean over layers"),
    "sink_rate": ("Sink rate", SNAPSHOT, "share of heads, mean over layers"),
    "stream_growth": ("Growth of the residual stream", SNAPSHOT, "norm at the last layer / at the first"),
    "entropy": ("Entropy of attention", SNAPSHOT, "nats, mean over layers"),
    "token_similarity": ("Over-smoothing", SNAPSHOT, "cosine of different tokens, mean over layers"),
    "output_spread": ("Outputs of sublayers over depth", f"{SNAPSHOT} {LATER}", "largest norm / smallest"),
    "gradient_spread": ("Gradients over depth", f"{SNAPSHOT} {LATER}", "largest norm / smallest"),
}


def drawn_panels(record: Comparison) -> list[Panel]:
    """Return all figures, configuration by configuration."""
    # A variant has one color in all figures; the baseline is gray.
    colors = {name: COLORS[(n - 1) % len(COLORS)] if n else QUIET for n, name in enumerate(record.ordered)}
    panels: list[Panel] = []
    for index, configuration in enumerate(record.configurations):
        suffix = "" if len(record.configurations) == 1 else f"_{index}"
        panels += _differences(record, configuration, suffix)
        # the variants that have runs, without the baseline, in groups of one figure each
        others = [variant for variant in record.ordered[1:] if record.runs_of(configuration.label, variant)]
        groups = [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)]
        panels += _relative(record, configuration, suffix, colors, groups)
        panels += _curves(record, configuration, suffix, colors, groups)
        panels += _mixing(record, configuration, suffix)
    return [*panels, *_laws(record, colors)]


def _differences(record: Comparison, configuration: Configuration, suffix: str) -> list[Panel]:
    """Return the differences of the final loss, one row per variant, the lowest on top."""
    results = [(each.variant, each.final) for each in record.outcomes if each.configuration == configuration.label]
    finals = sorted(
        ((variant, final) for variant, final in results if final is not None), key=lambda result: result[1].change.value
    )
    if not finals:
        return []
    changes = [final.change for _, final in finals]
    dots = Dots([variant for variant, _ in finals], *band(changes), single=[final.values for _, final in finals])
    caption = (
        f"Held-out loss minus that of {record.baseline}: left of 0 is lower. Small points: seeds; large: their mean"
    )
    caption += ", with its 95% confidence interval." if any(change.interval for change in changes) else ", no interval."
    title = titled("Difference of the final loss", configuration.label)
    return [Panel(f"difference{suffix}", title, caption, LOSS, "", dots=dots)]


def _relative(
    record: Comparison, configuration: Configuration, suffix: str, colors: Mapping[str, str], groups: Groups
) -> list[Panel]:
    """Return the relative curves, with bands from three seeds on."""
    results = {each.variant: each for each in record.outcomes if each.configuration == configuration.label}
    drawn = []
    over, bands = 0, False
    for group in groups:
        lines = []
        for variant in group:
            result = results.get(variant)
            curve = None if result is None else result.curve
            if curve is None:
                continue
            over = over or round(curve.window * curve.steps[-1] / len(curve.steps))
            bands = bands or curve.low is not None
            lines.append(Line(variant, [*map(float, curve.steps)], curve.mean, curve.low, curve.high, colors[variant]))
        drawn.append(lines)
    caption = (
        f"Training loss, smoothed over {over:,} steps, minus that of {record.baseline} with the same seed: below 0 is "
        f"lower.{' Bands: 95% confidence intervals over seeds.' if bands else ''}"
    )
    return _panels(f"relative_loss{suffix}", "Relative training loss", configuration, caption, LOSS, drawn)


def _curves(
    record: Comparison, configuration: Configuration, suffix: str, colors: Mapping[str, str], groups: Groups
) -> list[Panel]:
    """Return quantities by step, means over seeds, with the baseline in each figure."""
    lines: dict[tuple[str, str], Line] = {}  # quantity and variant → the mean over its runs
    for variant in record.ordered:
        runs = record.runs_of(configuration.label, variant)
        for key in CURVES:
            curves: list[dict[int, float | None]] = []
            for run in runs:
                trace = {"training_loss": run.curve, "validation_loss": run.validation}.get(key)
                if trace is None:
                    curves.append({snapshot.step: getattr(snapshot, key) for snapshot in run.snapshots})
                else:
                    curves.append(dict(zip(trace.steps, trace.losses, strict=True)))
            # Only steps at which all runs have a value: where a seed is missing, the mean would jump.
            means = {}
            for step in curves[0] if curves else ():
                values = [value for curve in curves if (value := curve.get(step)) is not None]
                if len(values) == len(curves):
                    means[float(step)] = float(np.mean(values))
            if len(means) > 1:
                lines[key, variant] = Line(variant, [*means], [*means.values()], color=colors[variant])

    panels = []
    for key, (title, caption, axis) in CURVES.items():
        drawn = []
        for group in groups:
            drawn.append([lines[key, name] for name in (record.baseline, *group) if (key, name) in lines])
        panels += _panels(f"{key}{suffix}", title, configuration, caption, axis, drawn)
    return panels


def _mixing(record: Comparison, configuration: Configuration, suffix: str) -> list[Panel]:
    """Return the depth-mixing matrices of all variants in one figure, mean over seeds, a column apart."""
    columns, columns_of, ticks = [], [], {}
    for variant in record.ordered:
        tables = [
            run.depth_mixing for run in record.runs_of(configuration.label, variant) if run.depth_mixing is not None
        ]
        # A variant with another number of layers has other rows, and is left out.
        if tables and (not columns or len(columns[0]) == len(tables[0].readers)):
            matrix = np.mean([np.array(table.weights, dtype=float) for table in tables], axis=0)  # (readers, sources)
            matrix /= np.nanmax(np.abs(matrix), axis=1, keepdims=True)
            ticks[len(columns) + matrix.shape[1] / 2] = variant
            columns += [*matrix.T, np.full(len(matrix), np.nan)]
            columns_of += [*(f"{variant}, source {source}" for source in range(matrix.shape[1])), ""]
    if len(ticks) < 2:
        return []
    z = np.array(columns).T
    cells = [[None if np.isnan(weight) else float(weight) for weight in row] for row in z]
    limits = (min(0.0, float(np.nanmin(z))), 1.0)
    heat = Heat([*range(len(columns))], [*range(len(z))], cells, "weight", limits, columns=columns_of)
    caption = (
        "Weight of the embedding (a variant's first column) and of each earlier sublayer's output in the input of each "
        "sublayer (row), relative to the row's largest: a norm follows, so a row's scale does not matter. "
        "Trained models, means over held-out tokens and seeds. The last row is the output."
    )
    title = titled("Depth mixing", configuration.label)
    return [Panel(f"depth_mixing{suffix}", title, caption, "", "sublayer", heat=heat, wide=True, x_ticks=ticks)]


def _panels(
    key: str, title: str, configuration: Configuration, caption: str, axis: str, groups: Sequence[Sequence[Line]]
) -> list[Panel]:
    """Return a figure for each group of lines, all with the same vertical scale."""
    drawn = [group for group in groups if group]
    panels = []
    for part, lines in enumerate(drawn):
        count, end = (f" ({part + 1} of {len(drawn)})", f"_part_{part}") if len(drawn) > 1 else ("", "")
        full_title = titled(f"{title}{count}", configuration.label)
        panels.append(Panel(f"{key}{end}", full_title, caption, "step", axis, lines))
    return same_scale(panels)


def _laws(record: Comparison, colors: Mapping[str, str]) -> list[Panel]:
    """Return the final losses by cost, the baseline in each figure, for each group of configurations that has laws."""
    panels: list[Panel] = []
    caption = "Mean over seeds against the total cost of a run; on these axes a power law is a straight line."
    for (where, cost), (first, *others) in record.law_groups().items():
        for start in range(0, len(others), TOGETHER):
            lines = []
            for law in (first, *others[start : start + TOGETHER]):
                costs, losses = zip(*sorted(zip(law.costs, law.losses, strict=True)), strict=True)
                lines.append(Line(law.variant, costs, losses, color=colors[law.variant]))
            title = titled(f"Final loss by {COSTS[cost]}", where)
            axes = {"x_title": COSTS[cost], "y_title": LOSS, "log_x": True, "log_y": True}
            panels.append(Panel(f"scaling_{len(panels)}", title, caption, lines=lines, **axes))
    return panels

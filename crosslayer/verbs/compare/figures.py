"""The figures of a comparison: curves in groups of at most six arms, so that each can be told; then the differences."""

from collections.abc import Callable, Sequence

import numpy as np

from crosslayer.output.panel import COLORS, QUIET, Dots, Line, Panel, same_scale
from crosslayer.verbs.compare.record import COSTS, ComparedRun, Glance, Law, Outcome, Setting
from crosslayer.verbs.compare.result import Comparison

TOGETHER = 6  # lines of arms in a figure
GLANCES: tuple[tuple[str, str, str, Callable[[Glance], float | None]], ...] = (
    ("first_token", "Attention on the first token", "share, mean over layers", lambda seen: seen.first_token_share),
    ("sink_rate", "Sink rate", "share of heads, mean over layers", lambda seen: seen.sink_rate),
    ("stream_growth", "Growth of the stream", "norm at the last layer / at the first", lambda seen: seen.stream_growth),
)


def drawn_panels(record: Comparison) -> list[Panel]:
    """Return all figures, setting by setting."""
    panels = []
    for number, setting in enumerate(record.settings):
        drawn = _Setting(record, setting, "" if len(record.settings) == 1 else f"_{number}")
        panels += [*drawn.differences(), *drawn.relative(), *drawn.training(), *drawn.validation(), *drawn.glances()]
    return [*panels, *_law_panels(record)]


def _law_panels(record: Comparison) -> list[Panel]:
    """Return the final losses by cost, the baseline in each figure, for each group of settings that has laws."""
    panels: list[Panel] = []
    words = "Means over seeds, against the whole cost of a run; a power law is a straight line here."
    for where, cost in dict.fromkeys((law.where, law.cost) for law in record.laws):
        first, *others = (law for law in record.laws if (law.where, law.cost) == (where, cost))
        for start in range(0, len(others), TOGETHER):
            group = zip(others[start : start + TOGETHER], COLORS, strict=False)
            lines = [_law_line(first, QUIET), *(_law_line(law, color) for law, color in group)]
            title = f"Final loss by {COSTS[cost]}{f', {where}' if where else ''}"
            axes = {"x_title": COSTS[cost], "y_title": "nats a token", "log_x": True, "log_y": True}
            panels.append(Panel(f"scaling_{len(panels)}", title, words, lines=lines, **axes))
    return panels


def _law_line(law: Law, color: str) -> Line:
    points = sorted(zip(law.costs, law.losses, strict=True))
    return Line(law.arm, [cost for cost, _ in points], [loss for _, loss in points], color=color)


class _Setting:
    """The figures of a setting; `suffix` tells their files from those of others."""

    def __init__(self, record: Comparison, setting: Setting, suffix: str):
        self.record, self.suffix = record, suffix
        self.place = f", {setting.label}" if setting.label else ""
        self.results = [result for result in record.outcomes if result.setting == setting.label]
        self.runs = {arm.label: record.of(setting.label, arm.label) for arm in record.arms}
        others = [arm for arm, runs in self.runs.items() if runs and arm != record.baseline]
        self.groups = [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)]

    def differences(self) -> list[Panel]:
        """Return the differences of the final loss, an arm a row, the lowest on top."""
        results = [result for result in self.results if result.final is not None]
        results.sort(key=lambda result: result.final.mean if result.final is not None else 0.0)
        finals = [result.final for result in results if result.final is not None]
        if not finals:
            return []
        intervals = [final.interval or (None, None) for final in finals]
        dots = Dots(
            names=[result.arm for result in results],
            x=[final.mean for final in finals],
            low=[low for low, _ in intervals],
            high=[high for _, high in intervals],
            single=[final.values for final in finals],
        )
        words = (
            f"Held-out loss less that of {self.record.baseline}: left of 0 is lower. Large: mean over pairs of runs, "
            "with its 95 % interval where there are three; small: the pairs."
        )
        title = f"Difference at the end{self.place}"
        return [Panel(f"difference{self.suffix}", title, words, "nats a token", "", dots=dots)]

    def relative(self) -> list[Panel]:
        """Return the relative curves with their bands."""
        curves = {result.arm: result for result in self.results if result.curve is not None}
        groups = [[arm for arm in group if arm in curves] for group in self.groups]
        over = next((steps_smoothed(result) for result in curves.values()), 0)
        words = (
            f"Training loss, smoothed over {over:,} steps, less that of {self.record.baseline} with the same seed: "
            "below 0 is lower. Bands: 95 % intervals over seeds, of two seeds both curves."
        )
        lines = [[_relative_line(curves[arm], color) for arm, color in _colored(group)] for group in groups]
        return self._panels("relative_loss", "Relative training loss", words, "nats a token", lines)

    def training(self) -> list[Panel]:
        """Return the training losses, means over seeds."""
        words = "Mean over seeds; each point is the mean since the point before."
        return self._curves("training_loss", "Training loss", words, lambda run: (run.curve.steps, run.curve.losses))

    def validation(self) -> list[Panel]:
        """Return the held-out losses, means over seeds, where they were measured on the way."""
        words = "Held-out text, with the shares that its domains have in training; mean over seeds."
        return self._curves(
            "validation_loss", "Validation loss", words, lambda run: (run.validation.steps, run.validation.losses)
        )

    def glances(self) -> list[Panel]:
        """Return what was seen inside of the models on the way."""
        panels = []
        for key, title, axis, value in GLANCES:
            read = _glance_reader(value)
            panels += self._curves(key, title, "Mean over seeds, on a few held-out windows.", read, axis)
        return panels

    def _curves(
        self,
        key: str,
        title: str,
        words: str,
        read: Callable[[ComparedRun], tuple[Sequence[int], Sequence[float]]],
        axis: str = "nats a token",
    ) -> list[Panel]:
        """Return a quantity by step, the baseline in each figure."""
        reference = _mean_line(self.record.baseline, [read(run) for run in self.runs[self.record.baseline]], QUIET)
        groups = []
        for group in self.groups:
            lines = [_mean_line(arm, [read(run) for run in self.runs[arm]], color) for arm, color in _colored(group)]
            groups.append([line for line in (reference, *lines) if line is not None])
        return self._panels(key, title, words, axis, groups)

    def _panels(self, key: str, title: str, words: str, axis: str, groups: Sequence[Sequence[Line]]) -> list[Panel]:
        """Return a figure for each group of lines, of one scale."""
        drawn = [group for group in groups if group]
        panels = []
        for number, lines in enumerate(drawn):
            part = f" ({number + 1} of {len(drawn)})" if len(drawn) > 1 else ""
            name = f"{key}{self.suffix}" + (f"_part_{number}" if len(drawn) > 1 else "")
            panels.append(Panel(name, f"{title}{part}{self.place}", words, "step", axis, lines))
        return same_scale(panels)


def steps_smoothed(result: Outcome) -> int:
    """Return over how many steps an outcome's curve is smoothed."""
    assert result.curve is not None
    return round(result.curve.window * result.curve.steps[-1] / len(result.curve.steps))


def _colored(group: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(group, COLORS, strict=False))


def _relative_line(result: Outcome, color: str) -> Line:
    curve = result.curve
    assert curve is not None
    return Line(result.arm, [*map(float, curve.steps)], curve.mean, curve.low, curve.high, color)


def _mean_line(name: str, traces: Sequence[tuple[Sequence[int], Sequence[float]]], color: str) -> Line | None:
    """Return the mean of curves at the steps that all have; None where these are fewer than two."""
    if not traces:
        return None
    by_step = [dict(zip(*trace, strict=True)) for trace in traces]
    steps = [step for step in traces[0][0] if all(step in values for values in by_step)]
    if len(steps) < 2:
        return None
    means = [float(np.mean([values[step] for values in by_step])) for step in steps]
    return Line(name, [*map(float, steps)], means, color=color)


def _glance_reader(
    value: Callable[[Glance], float | None],
) -> Callable[[ComparedRun], tuple[Sequence[int], Sequence[float]]]:

    def read(run: ComparedRun) -> tuple[list[int], list[float]]:
        seen = [(glance.step, value(glance)) for glance in run.glances]
        known = [(step, number) for step, number in seen if number is not None]
        return [step for step, _ in known], [number for _, number in known]

    return read

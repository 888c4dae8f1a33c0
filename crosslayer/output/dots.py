"""Values with intervals, a row each: a part of a figure, for Plotly and for matplotlib."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dots:
    """Values along the horizontal axis, a row for each name, the first on top, with intervals where there are any.

    `single` are the values that each is the mean of, drawn small; a line stands at 0.
    """

    names: Sequence[str]
    x: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]
    single: Sequence[Sequence[float]]

    @property
    def height(self) -> int:
        """Pixels of the figure."""
        return max(240, 80 + 36 * len(self.names))

    @property
    def points(self) -> tuple[list[float], list[int]]:
        """Places of the single values: along the axis, and their rows."""
        pairs = [(x, row) for row, values in enumerate(self.single) for x in values]
        return [x for x, _ in pairs], [row for _, row in pairs]

    @property
    def places(self) -> list[float]:
        """Everything that the axis must reach, 0 included."""
        ends = [end for end in (*self.low, *self.high) if end is not None]
        return [0.0, *self.x, *ends, *self.points[0]]

    @property
    def labels(self) -> dict[float, str]:
        """Names by row; long ones are broken before a bracket or a plus."""
        broken = [re.sub(r"(?<=.)(?=[(+])", "<br>", name) if len(name) > 16 else name for name in self.names]
        return dict(enumerate(broken))


def dot_traces(dots: Dots, color: str, quiet: str) -> list[dict[str, Any]]:
    """Return for Plotly the single values, and above them the means with their intervals."""
    xs, rows = dots.points
    base = {"type": "scatter", "mode": "markers", "hovertemplate": "%{text} %{x:.4g}<extra></extra>"}
    single = {**base, "x": xs, "y": rows, "text": [dots.names[row] for row in rows]}
    single["marker"] = {"size": 5, "color": quiet, "opacity": 0.6}
    mean = {**base, "x": dots.x, "y": [*range(len(dots.names))], "text": dots.names}
    mean["marker"] = {"size": 9, "color": color}
    ends = list(zip(dots.x, dots.low, dots.high, strict=True))
    mean["error_x"] = {
        "symmetric": False,
        "array": [0.0 if high is None else high - x for x, _, high in ends],
        "arrayminus": [0.0 if low is None else x - low for x, low, _ in ends],
    }
    return [single, mean]


def draw_dots(axes: Any, dots: Dots, color: str, quiet: str) -> None:
    """Draw the same with matplotlib."""
    axes.axvline(0, color=quiet, linewidth=1)
    axes.scatter(*dots.points, color=quiet, s=12, alpha=0.6)
    axes.scatter(dots.x, range(len(dots.names)), color=color, s=40)
    for row, (low, high) in enumerate(zip(dots.low, dots.high, strict=True)):
        if low is not None and high is not None:
            axes.hlines(row, low, high, color=color)
    axes.set_ylim(len(dots.names) - 0.5, -0.5)
    axes.grid(alpha=0.3)

"""A figure as data: lines, a map, points with intervals or layers, with its caption and axes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

COLORS = ("#2457c5", "#c4472f", "#23865f", "#8a5fbf", "#b8860b", "#1391a8", "#c2549a", "#7a5640")
# the color of context: other tokens, the baseline
QUIET = "#697082"


@dataclass(frozen=True)
class Line:
    """A curve with its band; None in `y` is a gap. Without a color it gets the next of `COLORS`."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    color: str | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Heat:
    """A heat map, z[row][column]; `x` are centers, or edges if there is one more; `limits` end the color scale.

    `columns` names the columns in tooltips, instead of `x`. With `written`, each cell shows its rounded number.
    """

    x: Sequence[float]
    y: Sequence[float]
    z: list[list[float | None]]
    label: str
    limits: tuple[float, float]
    square: bool = False
    columns: Sequence[str] | None = None
    written: bool = False


@dataclass(frozen=True)
class Dots:
    """Values along the horizontal axis, a row for each name, the first on top, with intervals if there are any.

    `single` are the values that each mean is taken over, drawn small; a line marks 0.
    """

    names: Sequence[str]
    x: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]
    single: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Wires:
    """Layers: what each stores, and lines to it from the layers whose states it reads; the first at the bottom.

    `widths` are the bars' lengths, `kinds` what their colors mean, `sources` the other layers whose states each reads.
    """

    widths: Sequence[float]
    kinds: Sequence[str]
    sources: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Panel:
    """A figure: its file name, title, a sentence that explains it, and what is drawn.

    `bounds` are the least and the greatest value that is possible: bands end there. `y_range` are the ends of the axis,
    by default those of what is drawn. `x_ticks` and `y_ticks` map values of an axis to labels. An axis whose values are
    all whole numbers has ticks at whole numbers only. `bars` draws intervals as error bars instead of bands, those of
    different lines next to each other.
    """

    key: str
    title: str
    sentence: str
    x_title: str
    y_title: str
    lines: Sequence[Line] = ()
    heat: Heat | None = None
    dots: Dots | None = None
    wires: Wires | None = None
    log_x: bool = False
    log_y: bool = False
    wide: bool = False
    bars: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)
    y_range: tuple[float, float] | None = None
    x_ticks: dict[float, str] = field(default_factory=dict)
    y_ticks: dict[float, str] = field(default_factory=dict)

    @property
    def height(self) -> int | None:
        """Pixels of the figure, None for the usual height."""
        # room for each row, beside that of the axis and the legend: a name of several lines, or the bar of a layer
        if self.dots is not None:
            return max(240, 80 + 36 * len(self.dots.names))
        if self.wires is not None:
            return max(240, 90 + 13 * len(self.wires.widths))
        return None


def colored_lines(panel: Panel) -> list[Line]:
    """Return the lines with their colors, and with bands clipped to possible values.

    On a logarithmic axis a band that reaches 0 ends at half of the lowest point, below the visible range.
    """
    lower, upper = panel.bounds
    if panel.log_y:
        lower = max(lower, lowest(panel) / 2)

    def cut(band: Sequence[float | None] | None) -> list[float | None] | None:
        if band is None:
            return None
        return [None if end is None else min(max(end, lower), upper) for end in band]

    colors = itertools.cycle(COLORS)
    return [
        replace(line, low=cut(line.low), high=cut(line.high), color=line.color or next(colors)) for line in panel.lines
    ]


def lowest(panel: Panel) -> float:
    """Return the lowest point above 0."""
    return min((y for line in panel.lines for y in line.y if y is not None and y > 0), default=1.0)

"""A figure as data, and its two renderers: Plotly for the page, matplotlib for SVG files."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosslayer.output.dots import Dots, dot_traces, draw_dots

COLORS = ("#2457c5", "#c4472f", "#23865f", "#8a5fbf", "#b8860b", "#1391a8", "#c2549a", "#7a5640")
QUIET = "#697082"  # what a figure is not about: the other tokens, the baseline
MARKED = 100  # points of a line, above which they are not marked
STEPS = 7  # of an axis of whole numbers, at most
PADDING = 0.04  # of an axis, beyond what is drawn
BESIDE = 0.7  # the same for whole numbers


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
    """A heat map, z[row][column]; `x` are centres, or edges if there is another; `limits` end the color scale.

    `columns` names the columns where a pointer is over them, instead of `x`. `written` sets each number, rounded, into
    its cell.
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
class Panel:
    """A figure: its file name, title, the sentence that says what to see, and what is drawn.

    `bounds` are the least and the greatest value that is possible: bands end there. `y_range` are the ends of the axis,
    by default those of what is drawn. `x_ticks` and `y_ticks` map places of an axis to labels. An axis whose values are
    all whole numbers has ticks at whole numbers only.
    """

    key: str
    title: str
    sentence: str
    x_title: str
    y_title: str
    lines: Sequence[Line] = ()
    heat: Heat | None = None
    dots: Dots | None = None
    log_x: bool = False
    log_y: bool = False
    wide: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)
    y_range: tuple[float, float] | None = None
    x_ticks: dict[float, str] = field(default_factory=dict)
    y_ticks: dict[float, str] = field(default_factory=dict)


def by_position(
    edges: Sequence[int],
    length: int,
    z: list[list[float | None]],
    label: str,
    limits: tuple[float, float],
    position: int = 0,
) -> dict[str, Any]:
    """Return `heat`, `log_x` and `x_ticks` of a panel of layers by bins of positions, counted from 0.

    Bin i holds the positions edges[i] to edges[i + 1] − 1, the last up to length − 1. Position p reaches from p + 1 to
    p + 2 of a logarithmic axis. `position` is sure to have a label.
    """
    ends = [*edges[1:], length]
    columns = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in zip(edges, ends, strict=True)]
    heat = Heat([edge + 1.0 for edge in (*edges, length)], [*range(len(z))], z, label, limits, columns=columns)
    return {"heat": heat, "log_x": True, "x_ticks": _position_ticks(length, position)}


def _position_ticks(length: int, position: int) -> dict[float, str]:
    """Return labels in the middle of their positions: 0, 1, 2, 5, 10 …, and `position` instead of those beside it."""
    powers = range(len(str(length)))
    digits = {power: (1, 2, 5) if power == 0 or length <= 1000 else (1,) for power in powers}
    usual = [0, *(digit * 10**power for power in powers for digit in digits[power])]
    near = 1.7 if position >= 10 else 1.0  # labels are wider than single positions there
    shown = [p for p in usual if p < length and not 1 / near < (p + 1.5) / (position + 1.5) < near]
    return {math.sqrt((p + 1) * (p + 2)): str(p) for p in sorted({*shown, position})}


def same_scale(panels: Sequence[Panel]) -> list[Panel]:
    """Return panels of the same quantity with the same vertical axis."""
    if not panels:
        return []
    spans = [_span(panel) for panel in panels]
    ends = min(low for low, _ in spans), max(high for _, high in spans)
    return [replace(panel, y_range=ends) for panel in panels]


def drawn(panel: Panel) -> list[Line]:
    """Return the lines with their colors, and with bands that end where values are impossible.

    On a logarithmic axis a band that reaches 0 runs out at half of the lowest point.
    """
    lower, upper = panel.bounds
    heights = [y for line in panel.lines for y in line.y if y is not None]
    if panel.log_y:
        lower = max(lower, min((y for y in heights if y > 0), default=1.0) / 2)

    def cut(band: Sequence[float | None] | None) -> list[float | None] | None:
        return None if band is None else [None if v is None else min(max(v, lower), upper) for v in band]

    colors = itertools.cycle(COLORS)
    return [
        replace(line, low=cut(line.low), high=cut(line.high), color=line.color or next(colors)) for line in panel.lines
    ]


def plotly_figure(panel: Panel) -> dict[str, Any]:
    """Return data and layout of a panel for `Plotly.newPlot`; the page itself says how large it is."""
    traces = [trace for line in drawn(panel) for trace in (*_band(line), _curve(line))]
    if panel.heat is not None:
        traces.append(_heat_trace(panel))
    if panel.dots is not None:
        traces += dot_traces(panel.dots, COLORS[0], QUIET)
    layout: dict[str, Any] = {
        "margin": {"l": 56, "r": 12, "t": 10, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#2b3042"},
        "xaxis": _axis(panel.x_title, panel.log_x, _columns(panel), panel.x_ticks),
        "yaxis": _axis(panel.y_title, panel.log_y, _rows(panel), panel.y_ticks),
        "showlegend": False,  # the legend of the page is outside of the plot
        "hovermode": "closest" if panel.heat is not None else "x unified",
    }
    if panel.dots is not None:
        rows = len(panel.dots.names)
        layout["yaxis"] = {**_axis("", False, [], panel.dots.labels), "range": [rows - 0.5, -0.5], "ticks": ""}
        layout["xaxis"] |= {"range": _ends(_width(panel), False), "zeroline": True, "zerolinecolor": QUIET}
        layout["xaxis"] |= {"nticks": 5}
        layout["hovermode"] = "closest"
    elif panel.heat is None:
        layout["xaxis"]["range"] = _ends(_width(panel), panel.log_x)
        layout["yaxis"]["range"] = _ends(panel.y_range or _span(panel), panel.log_y)
    elif panel.heat.square:
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
        layout["xaxis"] |= {"constrain": "domain"}
    return {"data": traces, "layout": layout}


def _axis(title: str, log: bool, values: Sequence[float], ticks: dict[float, str]) -> dict[str, Any]:
    axis = {
        "title": {"text": title, "standoff": 8},
        "type": "log" if log else "linear",
        "gridcolor": "#e6e8ee",
        "zeroline": False,
        "linecolor": "#c5cad6",
        "automargin": True,
    }
    if ticks:
        return {**axis, "tickmode": "array", "tickvals": [*ticks], "ticktext": [*ticks.values()]}
    if log:
        places = _log_ticks(*_reach([v for v in values if v > 0]))
        return {**axis, "tickmode": "array", "tickvals": places, "ticktext": [*map(_written, places)]}
    step = _whole_step(values)
    return axis if step is None else {**axis, "tickmode": "linear", "tick0": 0, "dtick": step, "tickformat": "d"}


def _columns(panel: Panel) -> list[float]:
    """Return the places of the horizontal axis where something is drawn."""
    if panel.dots is not None:
        return panel.dots.places
    return [x for line in panel.lines for x in line.x] + list(panel.heat.x if panel.heat is not None else [])


def _rows(panel: Panel) -> list[float]:
    """Return the places of the vertical axis where something is drawn, bands included."""
    heights = [panel.heat.y] if panel.heat is not None else []
    for line in drawn(panel):
        heights += [line.y, line.low or [], line.high or []]
    return [value for values in heights for value in values if value is not None]


def _reach(values: Iterable[float]) -> tuple[float, float]:
    values = [*values] or [0.0, 1.0]
    return min(values), max(values)


def _width(panel: Panel) -> tuple[float, float]:
    """Return the ends of the horizontal axis; layer 30 of 30, which is none, stays outside."""
    columns = _columns(panel)
    low, high = _reach(columns)
    whole = not panel.log_x and _whole_step(columns) is not None
    return (low - BESIDE, high + BESIDE) if whole else _padded(low, high, panel.log_x)


def _span(panel: Panel) -> tuple[float, float]:
    """Return the ends of the vertical axis: of what is drawn, with some room, but none below a band that runs out."""
    rows = [value for value in _rows(panel) if value > 0 or not panel.log_y] or [1.0]
    low, high = _padded(*_reach(rows), panel.log_y)
    points = [y for line in panel.lines for y in line.y if y is not None and y > 0]
    runs_out = panel.log_y and points and min(rows) <= min(points) / 2
    return (min(rows), high) if runs_out else (low, high)


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        room = (high / low) ** PADDING if high > low else 2.0
        return low / room, high * room
    room = PADDING * (high - low) or 0.5
    return low - room, high + room


def _ends(ends: tuple[float, float], log: bool) -> list[float]:
    """Return the ends of an axis as Plotly wants them."""
    return [math.log10(end) for end in ends] if log else [*ends]


def _whole_step(values: Sequence[float]) -> int | None:
    """Return the distance of ticks where all values are whole numbers: 1, 2, 5, 10 …, for at most `STEPS` of them."""
    if not values or any(value != round(value) for value in values):
        return None
    low, high = _reach(values)
    steps = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return next(step for step in steps if (high - low) / step <= STEPS)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within an axis; the powers alone where there are more than two."""
    low, high = _padded(low, high, True) if low > 0 else (1.0, 10.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1,) if math.log10(high / low) > 2.5 else (1, 2, 5)
    places = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
    return places if len(places) > 1 else [float(f"{low * (high / low) ** part:.3g}") for part in (0.1, 0.5, 0.9)]


def _written(place: float) -> str:
    """Write a tick of a logarithmic axis: 0.001, 20, 1,000,000."""
    return f"{place:,.0f}" if place >= 1000 else f"{place:g}"


def _curve(line: Line) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if len(line.x) <= MARKED else "lines",
        "x": line.x,
        "y": line.y,
        "name": line.name,
        "legendgroup": line.name,
        "line": {"color": line.color, "width": 2, "dash": "dot" if line.dashed else "solid"},
        "marker": {"size": 5},
        "hovertemplate": "%{y:.4g}",
    }
    if line.low is not None and line.high is not None:
        trace["customdata"] = [[*pair] for pair in zip(line.low, line.high, strict=True)]
        trace["hovertemplate"] += " (%{customdata[0]:.4g} to %{customdata[1]:.4g})"
    if len(line.x) == 1 and line.low is not None and line.high is not None:  # no band is seen
        y, low, high = line.y[0] or 0.0, line.low[0] or 0.0, line.high[0] or 0.0
        trace["error_y"] = {"symmetric": False, "array": [high - y], "arrayminus": [y - low]}
    return trace


def _band(line: Line) -> list[dict[str, Any]]:
    """Return the lower and the upper edge of a line's band, the space between them filled."""
    if line.low is None or line.high is None or line.color is None:
        return []
    red, green, blue = (int(line.color[i : i + 2], 16) for i in (1, 3, 5))
    edge = {"type": "scatter", "mode": "lines", "x": line.x, "legendgroup": line.name, "hoverinfo": "skip"}
    edge["line"] = {"width": 0, "color": line.color}
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.18)"}
    return [{**edge, "y": line.low}, {**edge, "y": line.high, **fill}]


def _heat_trace(panel: Panel) -> dict[str, Any]:
    heat = panel.heat
    assert heat is not None
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": heat.x,
        "y": heat.y,
        "z": heat.z,
        "zmin": heat.limits[0],
        "zmax": heat.limits[1],
        "colorscale": "Viridis",
        "showscale": False,
    }
    if heat.columns is not None:
        trace["text"] = [[*heat.columns] for _ in heat.z]
    column = "%{x}" if heat.columns is None else "%{text}"
    trace["hovertemplate"] = f"{panel.x_title} {column}<br>{panel.y_title} %{{y}}<br>%{{z:.3f}}<extra></extra>"
    if heat.written:
        trace["texttemplate"] = "%{z:.0f}"
    return trace


def save_svg(panel: Panel, folder: Path) -> Path:
    """Draw a panel into `folder`/<key>.svg with matplotlib, without touching its global state."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    square = panel.heat is not None and panel.heat.square
    height = 4.2 if panel.dots is None else panel.dots.height / 80
    figure = Figure(figsize=(5.4, 4.6) if square else (7.2, height), layout="constrained")
    axes = figure.add_subplot()
    if panel.dots is not None:
        draw_dots(axes, panel.dots, COLORS[0], QUIET)
    elif panel.heat is None:
        _draw_lines(axes, panel)
    else:
        _draw_heat(figure, axes, panel.heat)
    _draw_axes(axes, panel)
    if len(panel.lines) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path = folder / f"{panel.key}.svg"
    FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
    return path


def _draw_lines(axes: Any, panel: Panel) -> None:
    import numpy as np

    for line in drawn(panel):
        x, y = np.array(line.x, dtype=float), np.array(line.y, dtype=float)
        marker, style = "o" if len(x) <= MARKED else None, ":" if line.dashed else "-"
        axes.plot(x, y, color=line.color, label=line.name, marker=marker, markersize=3, linestyle=style)
        if line.low is not None and line.high is not None:
            low, high = np.array(line.low, dtype=float), np.array(line.high, dtype=float)
            axes.fill_between(x, low, high, color=line.color, alpha=0.18, linewidth=0)
            if len(x) == 1:
                axes.vlines(x, low, high, color=line.color)
    axes.grid(alpha=0.3)


def _draw_heat(figure: Any, axes: Any, heat: Heat) -> None:
    import numpy as np

    low, high = heat.limits
    edges = len(heat.x) > len(heat.z[0])  # then matplotlib needs edges of the rows as well
    rows = np.arange(len(heat.y) + 1) - 0.5 + heat.y[0] if edges else np.array(heat.y)
    z = np.array(heat.z, dtype=float)
    mesh = axes.pcolormesh(np.array(heat.x), rows, z, vmin=low, vmax=high, rasterized=True)
    figure.colorbar(mesh, ax=axes, label=heat.label)
    axes.set_aspect("equal" if heat.square else "auto")
    if heat.written:
        _write_cells(axes, heat)


def _write_cells(axes: Any, heat: Heat) -> None:
    """Write each number into its cell: dark on the light half of the scale, light on the dark one."""
    low, high = heat.limits
    edges = len(heat.x) > len(heat.z[0])
    for row, numbers in zip(heat.y, heat.z, strict=True):
        for column, number in enumerate(numbers):
            if number is not None:
                x = (heat.x[column] + heat.x[column + 1]) / 2 if edges else heat.x[column]
                color = "black" if number > (low + high) / 2 else "white"
                axes.text(x, row, f"{number:.0f}", ha="center", va="center", color=color)


def _draw_axes(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

    axes.set(title=panel.title, xlabel=panel.x_title, ylabel=panel.y_title)
    if panel.dots is not None:
        axes.set_yticks([*panel.dots.labels], panel.dots.names)
        axes.set_xlim(_width(panel))
        return
    for axis, log, values in ((axes.xaxis, panel.log_x, _columns(panel)), (axes.yaxis, panel.log_y, _rows(panel))):
        if log:
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
            axis.set_major_locator(FixedLocator(_log_ticks(*_reach([value for value in values if value > 0]))))
            axis.set_major_formatter(FuncFormatter(lambda place, _: _written(place)))
            axis.set_minor_locator(NullLocator())
        elif (step := _whole_step(values)) is not None:
            axis.set_major_locator(MultipleLocator(step))
    if panel.x_ticks:
        axes.set_xticks([*panel.x_ticks], [*panel.x_ticks.values()])
    if panel.y_ticks:
        axes.set_yticks([*panel.y_ticks], [*panel.y_ticks.values()])
    if panel.heat is None:
        axes.set_xlim(_width(panel))
        axes.set_ylim(panel.y_range or _span(panel))

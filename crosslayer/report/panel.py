"""A figure as data, and its two renderers: Plotly for the page, matplotlib for SVG files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLORS = ("#2457c5", "#d1495b", "#2f9e6e", "#8a5fbf")


@dataclass(frozen=True)
class Line:
    """One curve with its band; None in `y` is a gap."""

    name: str
    x: list[float]
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


@dataclass(frozen=True)
class Heat:
    """One heat map, z[row][column]; `x` are centres or, one more, edges; `limits` are the ends of the colour scale."""

    x: list[float]
    y: list[float]
    z: list[list[float | None]]
    label: str
    limits: tuple[float, float] | None = None
    square: bool = False


@dataclass(frozen=True)
class Panel:
    """A figure: its file name, title, the sentence that says what to see, and what is drawn."""

    key: str
    title: str
    sentence: str
    x_title: str
    y_title: str
    lines: list[Line] = field(default_factory=list)
    heat: Heat | None = None
    log_x: bool = False
    log_y: bool = False
    wide: bool = False


def plotly_figure(panel: Panel) -> dict[str, Any]:
    """Return data and layout of a panel for `Plotly.newPlot`."""
    traces: list[dict[str, Any]] = []
    for line, color in zip(panel.lines, COLORS, strict=False):
        traces += _band(line, color) if line.low is not None else []
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(line.x) <= 100 else "lines",
                "x": line.x,
                "y": line.y,
                "name": line.name,
                "line": {"color": color, "width": 2},
                "marker": {"size": 5},
            }
        )
    if panel.heat is not None:
        traces.append(_heat_trace(panel))
    axis = {"gridcolor": "#e6e8ee", "zeroline": False, "linecolor": "#c5cad6"}
    layout: dict[str, Any] = {
        "height": 420 if panel.heat is not None and panel.heat.square else 340,
        "margin": {"l": 58, "r": 14, "t": 12, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#2b3042"},
        "xaxis": {**axis, "title": {"text": panel.x_title}, "type": "log" if panel.log_x else "linear"},
        "yaxis": {**axis, "title": {"text": panel.y_title}, "type": "log" if panel.log_y else "linear"},
        "legend": {"orientation": "h", "y": 1.12, "x": 0},
        "showlegend": len(panel.lines) > 1,
        "hovermode": "closest" if panel.heat is not None else "x unified",
    }
    if panel.heat is not None and panel.heat.square:
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
        layout["xaxis"] |= {"constrain": "domain"}
    return {"data": traces, "layout": layout}


def _band(line: Line, color: str) -> list[dict[str, Any]]:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    edge = {
        "type": "scatter",
        "mode": "lines",
        "x": line.x,
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }
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
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": heat.label, "side": "right"}, "thickness": 12},
        "hovertemplate": f"{panel.x_title} %{{x}}<br>{panel.y_title} %{{y}}<br>%{{z:.3f}}<extra></extra>",
    }
    if heat.limits is not None:
        trace |= {"zmin": heat.limits[0], "zmax": heat.limits[1]}
    return trace


def save_svg(panel: Panel, folder: Path) -> Path:
    """Draw a panel into `folder`/<key>.svg with matplotlib, without touching its global state."""
    import numpy as np
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(5.4, 4.6) if panel.heat is not None and panel.heat.square else (7.2, 4.2),
        layout="constrained",
    )
    axes = figure.add_subplot()
    for line, color in zip(panel.lines, COLORS, strict=False):
        x, y = np.array(line.x, dtype=float), np.array(line.y, dtype=float)
        axes.plot(x, y, color=color, label=line.name, marker="o" if len(x) <= 100 else None, markersize=3)
        if line.low is not None and line.high is not None:
            axes.fill_between(
                x, np.array(line.low, dtype=float), np.array(line.high, dtype=float), color=color, alpha=0.18
            )
    if panel.heat is not None:
        heat = panel.heat
        low, high = heat.limits or (None, None)
        edges = len(heat.x) > len(heat.z[0])  # then matplotlib needs edges of the rows as well
        rows = np.arange(len(heat.y) + 1) - 0.5 + heat.y[0] if edges else np.array(heat.y)
        mesh = axes.pcolormesh(
            np.array(heat.x),
            rows,
            np.array(heat.z, dtype=float),
            vmin=low,
            vmax=high,
            rasterized=True,
        )
        figure.colorbar(mesh, ax=axes, label=heat.label)
        axes.set_aspect("equal" if heat.square else "auto")
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y and any(y is not None and y > 0 for line in panel.lines for y in line.y):
        axes.set_yscale("log")
    axes.set(title=panel.title, xlabel=panel.x_title, ylabel=panel.y_title)
    if len(panel.lines) > 1:
        axes.legend(frameon=False)
    if panel.heat is None:
        axes.grid(alpha=0.3)
    path = folder / f"{panel.key}.svg"
    FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
    return path

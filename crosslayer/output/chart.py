"""Vega-Lite charts of panels: drawn by the page, and written to SVG files by vl-convert."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosslayer.output.panel import COLORS, QUIET, Dots, Heat, Panel, Wires, colored_lines, lowest

# of Vega-Lite: vl-convert has several, and the page and the SVG files must be drawn by the same one
VERSION = "6.4"
MARKED = 100  # points of a line, above which they are not marked
BESIDE = 0.015  # share of the horizontal axis between error bars of the same x
LONGEST = 18  # characters of a line of a name
WHOLE_TICKS = 10  # whole numbers up to which each has a tick
LANE, LANES = 0.035, 4  # vertical lines beside bars of layers: share of the bars' greatest width, and how many
PADDING = 8  # pixels between what is drawn and the ends of an axis
# labelLimit 0 is no limit: Vega cuts labels at 180 pixels otherwise
CONFIG = {
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e6e8ee", "domainColor": "#c5cad6", "tickColor": "#c5cad6", "labelColor": "#2b3042"}
    | {"titleColor": "#2b3042", "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12}
    | {"labelLimit": 0, "labelSeparation": 6},
    "legend": {"labelLimit": 0, "symbolType": "stroke", "symbolStrokeWidth": 3, "symbolOpacity": 1},
    "lineBreak": "\n",
}


def same_scale(panels: Sequence[Panel]) -> list[Panel]:
    """Return panels of one quantity with a common vertical axis."""
    ends = [end for panel in panels for end in _ends(_heights(panel), panel.log_y)]
    return [replace(panel, y_range=(min(ends), max(ends))) for panel in panels]


def chart(panel: Panel) -> dict[str, Any]:
    """Return a panel as a Vega-Lite chart with title and legend; a page has its own instead of these."""
    datasets: dict[str, Any] = {}
    if panel.heat is not None:
        layers = _heat_layers(panel, panel.heat)
    elif panel.dots is not None:
        layers = _dot_layers(panel, panel.dots)
    elif panel.wires is not None:
        layers = _wire_layers(panel, panel.wires)
    else:
        layers = _line_layers(panel)
        # a dataset of its own: every mark and the tooltips draw from it, and the page has the points only once
        datasets["lines"] = _points(panel)
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{VERSION.split('.')[0]}.json",
        "title": panel.title,
        "background": "white",
        "padding": 12,
        "width": 360 if panel.heat is not None and panel.heat.square else 520,
        "height": panel.height or 360,
        "config": CONFIG,
        # names of lines that the page's legend has switched off
        "params": [{"name": "hidden", "value": []}],
        "datasets": datasets,
        "layer": layers,
    }


def save_svg(panel: Panel, folder: Path) -> Path:
    """Write a panel into `folder`/<key>.svg, with title and legend."""
    # 30 MB, and only pages need it
    import vl_convert

    path = folder / f"{panel.key}.svg"
    path.write_text(vl_convert.vegalite_to_svg(chart(panel), vl_version=VERSION), encoding="utf-8")
    return path


def _line_layers(panel: Panel) -> list[dict[str, Any]]:
    lines = colored_lines(panel)
    names = [line.name for line in lines]
    x = _axis(panel.x_title, [x for line in lines for x in line.x], panel.log_x, panel.x_ticks)
    y = _axis(panel.y_title, _heights(panel), panel.log_y, panel.y_ticks)
    if panel.y_range is not None:
        y["scale"] |= {"domain": [*panel.y_range]}
    legend = {"title": None, "orient": "bottom", "columns": 2} if len(lines) > 1 else None
    colors = {"domain": names, "range": [line.color for line in lines]}
    color = {"field": "line", "type": "nominal", "legend": legend, "scale": colors}
    dashes = {"domain": names, "range": [[2, 3] if line.dashed else [1, 0] for line in lines]}
    dash = {"field": "line", "type": "nominal", "legend": legend, "scale": dashes}
    encoding = {"x": {"field": "at" if panel.bars else "x", **x}, "y": {"field": "y", **y}, "color": color}
    interval = {**encoding, "y": {"field": "low", **y}, "y2": {"field": "high"}}
    marks: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if panel.bars:
        marks.append(({"type": "rule", "strokeWidth": 2, "opacity": 0.6}, interval))
    else:
        # an area over a single point has no width: its band is the stroke
        area = {"type": "area", "clip": True, "fillOpacity": 0.18, "strokeOpacity": 0.4, "strokeWidth": 1.5}
        marks.append((area, {**interval, "stroke": color}))
    marks.append(({"type": "line", "strokeWidth": 2, "point": False}, {**encoding, "strokeDash": dash}))
    points = [len(line.x) for line in lines] or [0]
    if max(points) <= MARKED:
        # a point without a line beside it is drawn large
        size = 22 if min(points) > 1 else 60
        marks.append(({"type": "point", "filled": True, "size": size, "opacity": 1}, encoding))

    shown: list[dict[str, Any]] = [{"filter": "indexof(hidden, datum.line) < 0"}]
    # 0 has no place on a logarithmic axis
    above = [{"calculate": "datum.y > 0 ? datum.y : null", "as": "y"}] if panel.log_y else []
    layers = [{"data": {"name": "lines"}, "transform": shown + above, "mark": mark, "encoding": e} for mark, e in marks]
    return [*layers, _hover(panel.x_title, x, shown)]


def _points(panel: Panel) -> list[dict[str, Any]]:
    """Return a row for each point of each line; `at` sets error bars that share an `x` side by side."""
    lines = colored_lines(panel)
    points = []
    low_x, high_x = _ends([x for line in lines for x in line.x], panel.log_x)
    barred = [line for line in lines if line.low is not None]
    for line in lines:
        empty = [None] * len(line.x)
        for x, y, low, high in zip(line.x, line.y, line.low or empty, line.high or empty, strict=True):
            point = {"line": line.name, "x": x, "y": _short(y), "low": _short(low), "high": _short(high)}
            if panel.bars:
                beside = [candidate.name for candidate in barred if x in candidate.x]
                shift = BESIDE * (beside.index(line.name) - (len(beside) - 1) / 2) if line.name in beside else 0.0
                # a share of the axis, so that bars are as far apart on a logarithmic one
                point["at"] = _short(x * (high_x / low_x) ** shift if panel.log_x else x + (high_x - low_x) * shift)
            points.append(point)
    return points


def _hover(title: str, x: dict[str, Any], shown: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a vertical line at each x with a tooltip: the values of all visible lines there, with their intervals."""
    interval = "datum.high == null ? '' : ' (' + format(datum.low, '.4~g') + ' to ' + format(datum.high, '.4~g') + ')'"
    value = f"datum.y == null ? '–' : format(datum.y, '.4~g') + ({interval})"
    title = title or "x"
    # Vega reads a dot in a field's name as a nested field
    name = re.sub(r"([\\.\[\]'\"])", r"\\\1", title)
    # of one row for each point, a row for each x with a column for each line: the tooltip shows all columns
    pivot = {"pivot": "line", "value": "value", "op": "max", "groupby": [name]}
    visible = {"condition": {"param": "pointer", "empty": False, "value": 0.5}, "value": 0}
    nearest = {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True}
    return {
        "data": {"name": "lines"},
        "transform": [*shown, {"calculate": "datum.x", "as": title}, {"calculate": value, "as": "value"}, pivot],
        "mark": {"type": "rule", "color": QUIET, "tooltip": {"content": "data"}},
        "encoding": {"x": {**x, "field": name}, "opacity": visible},
        "params": [{"name": "pointer", "select": nearest}],
    }


def _heat_layers(panel: Panel, heat: Heat) -> list[dict[str, Any]]:
    edges = [*heat.x]
    if len(heat.x) <= len(heat.z[0]):
        edges = [*(center - 0.5 for center in heat.x), heat.x[-1] + 0.5]
    names = heat.columns or [f"{x:g}" for x in heat.x[: len(heat.z[0])]]
    columns = [
        {"number": number, "x": left, "x2": right, "column": name}
        for number, (left, right, name) in enumerate(zip(edges[:-1], edges[1:], names, strict=True), 1)
    ]
    # one number a cell, not a row with its edges: the page of a diagnosis is 1.1 MB; the browser makes the cells
    rows = [{"row": row, "z": [_short(z, 4) for z in numbers]} for row, numbers in zip(heat.y, heat.z, strict=True)]
    cells = [
        {"flatten": ["z"]},
        {"window": [{"op": "row_number", "as": "number"}], "groupby": ["row"]},
        {"lookup": "number", "from": {"data": {"values": columns}, "key": "number", "fields": ["x", "x2", "column"]}},
        {"filter": "isValid(datum.z)"},
        {"calculate": "datum.row - 0.5", "as": "y"},
        {"calculate": "datum.row + 0.5", "as": "y2"},
        {"calculate": "(datum.x + datum.x2) / 2", "as": "middle"},
    ]
    x = _axis(panel.x_title, heat.x, panel.log_x, panel.x_ticks)
    x["scale"] |= {"domain": [edges[0], edges[-1]], "padding": 0}
    y = _axis(panel.y_title, heat.y, False, panel.y_ticks)
    y["scale"] |= {"domain": [min(heat.y) - 0.5, max(heat.y) + 0.5], "padding": 0}
    scale = {"scheme": "viridis", "domain": [*heat.limits], "clamp": True}
    color = {"field": "z", "type": "quantitative", "scale": scale, "legend": {"title": heat.label}}
    encoding: dict[str, Any] = {"x": {"field": "x", **x}, "x2": {"field": "x2"}, "y": {"field": "y", **y}}
    tooltip = [
        {"field": "column", "title": panel.x_title},
        {"field": "row", "title": panel.y_title},
        {"field": "z", "title": heat.label, "type": "quantitative", "format": ".3~f"},
    ]
    source = {"data": {"values": rows}, "transform": cells}
    # the stroke hides seams between cells
    encoding |= {"y2": {"field": "y2"}, "color": color, "stroke": color, "tooltip": tooltip}
    layers = [{**source, "mark": {"type": "rect", "strokeWidth": 0.6}, "encoding": encoding}]
    if heat.written:
        # viridis is dark below its middle, and light above
        dark = {"condition": {"test": f"datum.z > {sum(heat.limits) / 2}", "value": "black"}, "value": "white"}
        number = {"field": "z", "type": "quantitative", "format": ".0f"}
        text = {"x": {"field": "middle", **x}, "y": {"field": "row", **y}, "text": number, "color": dark}
        layers.append({**source, "mark": {"type": "text"}, "encoding": text})
    return layers


def _dot_layers(panel: Panel, dots: Dots) -> list[dict[str, Any]]:
    single = [{"row": row, "x": x} for row, xs in enumerate(dots.single) for x in xs]
    means = []
    for row, (name, x, low, high) in enumerate(zip(dots.names, dots.x, dots.low, dots.high, strict=True)):
        text = f"{x:.4g}" if low is None or high is None else f"{x:.4g} ({low:.4g} to {high:.4g})"
        means.append({"row": row, "name": name, "x": x, "low": low, "high": high, "value": text})
    ends = [end for end in (*dots.low, *dots.high) if end is not None]
    x = _axis(panel.x_title, [0.0, *dots.x, *ends, *(point["x"] for point in single)], False, panel.x_ticks)
    # labelFlush: a label at an end stays inside the figure
    x["axis"] |= {"tickCount": 5, "labelFlush": 12}
    names = []
    for name in dots.names:
        # a long name in lines that begin with a bracket or a plus
        lines = [line.strip() for line in re.split(r"(?<=.)(?=[(+])", name)] if len(name) > 16 else [name]
        lines = [line if len(line) <= LONGEST else f"{line[: LONGEST - 9]}…{line[-8:]}" for line in lines]
        names.append("\n".join(lines))
    labels = json.dumps(names, ensure_ascii=False)
    # rows by number, not by name: names may be equal, and Vega would draw their values in one row
    axis = {"title": None, "grid": True, "labelExpr": f"{labels}[datum.value]"}
    y = {"field": "row", "type": "nominal", "scale": {"domain": [*range(len(dots.names))]}, "axis": axis}
    at = {"x": {"field": "x", **x}, "y": y}
    interval = {"x": {"field": "low", **x}, "x2": {"field": "high"}, "y": y}
    tooltip = [{"field": "name", "title": "name"}, {"field": "value", "title": panel.x_title}]
    point = {"type": "point", "filled": True}
    return [
        _layer([{"x": 0}], {"type": "rule", "color": QUIET}, {"x": at["x"]}),
        _layer(single, {**point, "size": 18, "opacity": 0.6, "color": QUIET}, at),
        _layer(means, {"type": "rule", "strokeWidth": 2, "color": COLORS[0]}, interval),
        # last, above what they are the means of
        _layer(means, {**point, "size": 70, "opacity": 1, "color": COLORS[0]}, {**at, "tooltip": tooltip}),
    ]


def _wire_layers(panel: Panel, wires: Wires) -> list[dict[str, Any]]:
    """Return bars, lines from each source to its readers, and the heads of the lines."""
    # without any width there is still an axis
    widest = max(*wires.widths, 1e-9)
    bars = [
        {"layer": layer, "low": layer - 0.36, "high": layer + 0.36, "width": width, "kind": kind}
        for layer, (width, kind) in enumerate(zip(wires.widths, wires.kinds, strict=True))
        if width
    ]
    x: dict[str, Any] = {"type": "quantitative", "title": panel.x_title}
    x["scale"] = {"domain": [-widest * LANE * (LANES + 1) * any(wires.sources), widest]}
    # About five steps of 1, 2 or 5 times a power of ten. Vega would put ticks on the lanes, left of 0, too.
    power = 10.0 ** math.floor(math.log10(widest / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= widest / 5)
    # 1e-9: a last step at the very end is not lost to rounding
    steps = [count * step for count in range(int(widest / step + 1e-9) + 1)]
    x["axis"] = {"values": steps, "format": ".4~g", "grid": False}
    y: dict[str, Any] = {"type": "quantitative", "title": panel.y_title}
    y["scale"] = {"domain": [-0.6, len(wires.widths) - 0.4], "nice": False}
    y["axis"] = {"tickMinStep": 1, "format": "d", "grid": False}
    kinds = list(dict.fromkeys(bar["kind"] for bar in bars))
    color: dict[str, Any] = {"field": "kind", "type": "nominal", "scale": {"domain": kinds, "range": list(COLORS)}}
    color["legend"] = {"title": None, "orient": "bottom", "columns": 2, "symbolType": "square"} if kinds[1:] else None
    width = {"field": "width", "title": panel.x_title, "format": ".4~g"}
    tooltip = [{"field": "layer"}, {"field": "kind"}, width]
    bar = {"x": {"field": "width", **x}, "x2": {"datum": 0}, "y": {"field": "low", **y}, "y2": {"field": "high"}}
    line = {"x": {"field": "x", **x}, "x2": {"field": "to"}, "y": {"field": "y", **y}, "y2": {"field": "end"}}
    end = {"x": {"field": "x", **x}, "y": {"field": "y", **y}}
    head = {"type": "point", "shape": "triangle-right", "filled": True, "size": 34, "opacity": 1, "color": QUIET}
    lanes = lanes_of(wires.sources)
    lines, ends = [], []
    for reader, sources in enumerate(wires.sources):
        for source in sources:
            at = -widest * LANE * (1 + lanes[source])
            lines.append({"x": at, "to": at, "y": source, "end": reader})
            lines.append({"x": at, "to": 0, "y": reader, "end": reader})
            lines.append({"x": at, "to": 0, "y": source, "end": source})
            ends.append({"x": -widest * LANE / 2, "y": reader})
    return [
        _layer(bars, {"type": "rect"}, {**bar, "color": color, "tooltip": tooltip}),
        _layer(lines, {"type": "rule", "strokeWidth": 1.2, "color": QUIET}, line),
        _layer(ends, head, end),
    ]


def lanes_of(sources: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the number of each source's vertical line, from the bars to the left; overlapping lines differ."""
    last_reader = {source: reader for reader, read in enumerate(sources) for source in read}
    lanes: dict[int, int] = {}
    for source in sorted(last_reader):
        busy = {lane for earlier, lane in lanes.items() if last_reader[earlier] >= source}
        # where more overlap, they share the last lane: the figure has room for no more
        lanes[source] = next((lane for lane in range(LANES) if lane not in busy), LANES - 1)
    return lanes


def _layer(values: list[dict[str, Any]], mark: dict[str, Any], encoding: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"values": values}, "mark": mark, "encoding": encoding}


def _axis(title: str, values: Sequence[float], log: bool, ticks: dict[float, str]) -> dict[str, Any]:
    """Return scale and axis of a channel, which extend a few pixels beyond the values."""
    low, high = _ends(values, log)
    scale: dict[str, Any] = {"domain": [low, high], "nice": False, "padding": PADDING}
    scale |= {"type": "log"} if log else {"zero": False}
    axis: dict[str, Any] = {"labelOverlap": "greedy"}
    if ticks:
        labels = json.dumps([*ticks.values()], ensure_ascii=False)
        axis |= {"values": [*ticks], "labelExpr": f"{labels}[indexof({[*ticks]}, datum.value)]"}
    elif log:
        axis |= {"labelExpr": "datum.value >= 1000 ? format(datum.value, ',.0f') : format(datum.value, '~g')"}
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        round_ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        # on a short axis there may be none of these, and Vega chooses others
        if sum(low <= tick <= high for tick in round_ticks) > 1:
            axis["values"] = round_ticks
    elif all(value == round(value) for value in values):
        axis |= {"tickMinStep": 1, "format": "d"}
        # among so few, half steps would be drawn with rounded labels
        if high - low <= WHOLE_TICKS:
            axis["values"] = [*range(math.ceil(low), math.floor(high) + 1)]
    return {"type": "quantitative", "title": title or None, "scale": scale, "axis": axis}


def _heights(panel: Panel) -> list[float]:
    """Return the heights of lines and bands; on a logarithmic axis those above 0."""
    lines = colored_lines(panel)
    columns = [line.y for line in lines] + [band for line in lines for band in (line.low, line.high) if band]
    heights = [value for column in columns for value in column if value is not None]
    if not panel.log_y:
        return heights
    # without the ends of bands that reach 0, which `colored_lines` put there: they would stretch the axis
    return [value for value in heights if value > lowest(panel) / 2]


def _ends(values: Sequence[float], log: bool) -> list[float]:
    """Return the least and the greatest value, widened if they are equal."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    if low == high:
        return [low / 2, high * 2] if log else [low - 0.5, high + 0.5]
    return [low, high]


def _short(number: float | None, digits: int = 6) -> float | None:
    return None if number is None else float(f"{number:.{digits}g}")

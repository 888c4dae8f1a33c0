"""A figure of layers: what each stores, and lines to it from the layers whose states it reads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LANE, LANES = 0.035, 4  # vertical lines beside the bars: share of the figure's width, and how many


@dataclass(frozen=True)
class Wires:
    """A row for each layer, the first at the bottom.

    `widths` are the bars' lengths, `kinds` what their colors mean, `sources` the other layers whose states each reads.
    """

    widths: Sequence[float]
    kinds: Sequence[str]
    sources: Sequence[Sequence[int]]

    @property
    def height(self) -> int:
        """Pixels of the figure."""
        return max(240, 90 + 13 * len(self.widths))

    def layers(self, x_title: str, y_title: str, colors: Sequence[str], quiet: str) -> list[dict[str, Any]]:
        """Return the layers of a Vega-Lite chart: bars, lines, and their heads."""
        widest = max(*self.widths, 1e-9)
        bars = [
            {"layer": layer, "low": layer - 0.36, "high": layer + 0.36, "width": width, "kind": kind}
            for layer, (width, kind) in enumerate(zip(self.widths, self.kinds, strict=True))
            if width
        ]
        x: dict[str, Any] = {"type": "quantitative", "title": x_title}
        x["scale"] = {"domain": [-widest * LANE * (LANES + 1) * any(self.sources), widest]}
        x["axis"] = {"values": _round_steps(widest), "format": ".4~g", "grid": False}
        y: dict[str, Any] = {"type": "quantitative", "title": y_title}
        y["scale"] = {"domain": [-0.6, len(self.widths) - 0.4], "nice": False}
        y["axis"] = {"tickMinStep": 1, "format": "d", "grid": False}
        kinds = list(dict.fromkeys(bar["kind"] for bar in bars))
        color: dict[str, Any] = {"field": "kind", "type": "nominal", "scale": {"domain": kinds, "range": list(colors)}}
        color["legend"] = (
            {"title": None, "orient": "bottom", "columns": 2, "symbolType": "square"} if kinds[1:] else None
        )
        width = {"field": "width", "title": x_title, "format": ".4~g"}
        tooltip = [{"field": "layer"}, {"field": "kind"}, width]
        bar = {"x": {"field": "width", **x}, "x2": {"datum": 0}, "y": {"field": "low", **y}, "y2": {"field": "high"}}
        line = {"x": {"field": "x", **x}, "x2": {"field": "to"}, "y": {"field": "y", **y}, "y2": {"field": "end"}}
        end = {"x": {"field": "x", **x}, "y": {"field": "y", **y}}
        head = {"type": "point", "shape": "triangle-right", "filled": True, "size": 34, "opacity": 1, "color": quiet}
        lines, ends = self._lines(widest)
        return [
            _layer(bars, {"type": "rect"}, {**bar, "color": color, "tooltip": tooltip}),
            _layer(lines, {"type": "rule", "strokeWidth": 1.2, "color": quiet}, line),
            _layer(ends, head, end),
        ]

    def _lines(self, widest: float) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Return the lines from each source to its readers, and the points of their heads."""
        lines, ends, lanes = [], [], self._lanes()
        for reader, sources in enumerate(self.sources):
            for source in sources:
                at = -widest * LANE * (1 + lanes[source])
                lines.append({"x": at, "to": at, "y": source, "end": reader})
                lines.append({"x": at, "to": 0, "y": reader, "end": reader})
                lines.append({"x": at, "to": 0, "y": source, "end": source})
                ends.append({"x": -widest * LANE / 2, "y": reader})
        return lines, ends

    def _lanes(self) -> dict[int, int]:
        """Return the number of each source's vertical line, from the bars to the left; overlapping lines differ."""
        last = {source: reader for reader, sources in enumerate(self.sources) for source in sources}
        lanes: dict[int, int] = {}
        for source in sorted(last):
            busy = {lane for other, lane in lanes.items() if last[other] >= source}
            lanes[source] = next((lane for lane in range(LANES) if lane not in busy), LANES - 1)
        return lanes


def _round_steps(highest: float) -> list[float]:
    """Return 0 and about five steps of 1, 2 or 5 times a power of ten, up to the highest."""
    power = 10.0 ** math.floor(math.log10(highest / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= highest / 5)
    return [number * step for number in range(int(highest / step + 1e-9) + 1)]


def _layer(values: list[dict[str, Any]], mark: dict[str, Any], encoding: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"values": values}, "mark": mark, "encoding": encoding}

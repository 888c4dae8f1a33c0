"""The figures of a bench: for each batch size the ratios by context, and the time per token, measured and predicted."""

import itertools

from crosslayer.output.panel import COLORS, QUIET, Line, Panel, same_scale
from crosslayer.verbs.bench.record import MEASURES, SIDES, Row, Side
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.units import percent
from crosslayer.verbs.bench.words import TITLES

SIDE_COLORS = {"candidate": COLORS[0], "baseline": QUIET}


def drawn_panels(record: Benchmark) -> list[Panel]:
    """Return both figures of each batch size; the second is missing where nothing is predicted."""
    ratios, predictions = [], []
    for batch in dict.fromkeys(row.batch for row in record.rows):
        group = sorted((row for row in record.rows if row.batch == batch), key=lambda row: row.context)
        ratios.append(_ratios(group, batch, record.interval_coverage))
        if all(side.predicted is not None for row in group for side in row.tpot_dynamic.sides()):
            predictions.append(_prediction(group, batch))
    panels = []
    for ratio, prediction in itertools.zip_longest(same_scale(ratios), same_scale(predictions)):
        panels += [ratio] if prediction is None else [ratio, prediction]
    return panels


def _ratios(group: list[Row], batch: int, covered: float) -> Panel:
    x, ticks = _contexts(group)
    lines = [_ratio_line(group, x, measure) for measure in MEASURES]
    lines.append(Line("KV cache", x, [row.cache.dynamic.ratio for row in group]))
    bands = f" Bands: {percent(covered)} intervals of the median." if covered else ""
    words = f"Below 1 the candidate needs less.{bands}"
    title, titles = f"Ratios by context, batch {batch}", ("context (tokens)", "candidate ÷ baseline")
    return Panel(f"ratios_batch_{batch}", title, words, *titles, lines, log_x=len(x) > 1, x_ticks=ticks)


def _prediction(group: list[Row], batch: int) -> Panel:
    x, ticks = _contexts(group)
    lines = [line for side in SIDES for line in _time_lines(group, x, side)]
    words = "Dynamic cache. Predicted from bytes read and copied and the machine's own rates in this run."
    title, titles = f"Time per token, batch {batch}", ("context (tokens)", "milliseconds a token")
    return Panel(f"prediction_batch_{batch}", title, words, *titles, lines, log_x=len(x) > 1, x_ticks=ticks)


def _contexts(group: list[Row]) -> tuple[list[float], dict[float, str]]:
    x = [float(row.context) for row in group]
    return x, {context: f"{context:g}" for context in x}


def _ratio_line(group: list[Row], x: list[float], measure: str) -> Line:
    times = [row.times()[measure] for row in group]
    intervals = [time.interval for time in times if time.interval is not None]
    low, high = None, None
    if len(intervals) == len(times):
        low, high = [interval[0] for interval in intervals], [interval[1] for interval in intervals]
    return Line(TITLES[measure], x, [time.ratio for time in times], low, high)


def _time_lines(group: list[Row], x: list[float], side: Side) -> list[Line]:
    """Return a side's milliseconds a token as measured and, dashed, as predicted."""
    timings = [dict(row.tpot_dynamic.named_sides())[side] for row in group]
    measured = [1e3 * timing.median for timing in timings]
    predicted = [1e3 * timing.predicted.seconds for timing in timings if timing.predicted is not None]
    color = SIDE_COLORS[side]
    return [
        Line(f"{side}, measured", x, measured, color=color),
        Line(f"{side}, predicted", x, predicted, color=color, dashed=True),
    ]

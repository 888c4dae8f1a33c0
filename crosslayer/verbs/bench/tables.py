"""The tables of a bench: a short table for every reader, and all figures."""

from crosslayer.output.page import Table
from crosslayer.verbs.bench.record import SIDES, Both, CacheBytes, Comparison, PeakMemory, Row, Timing
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.units import duration, percent, ratio, size
from crosslayer.verbs.bench.words import TITLES, far_off, setting

UNKNOWN = "–"


def overview(record: Benchmark) -> Table:
    """Return the short table: a row for each context and batch size."""
    covered = f"{percent(record.interval_coverage)} interval" if record.interval_coverage else "no interval"
    times = [f"{title}\n({covered})".replace(", ", ",\n") for title in TITLES.values()]
    title = f"Candidate ÷ baseline, and below it their own figures (median of {record.settings.repeats} pairs of runs)"
    rows = [_overview_row(row) for row in record.rows]
    return title, ["context", "batch", "KV cache", *times, "peak memory"], rows


def details(record: Benchmark) -> list[Table]:
    """Return the long tables: every figure, and where a prediction is off."""
    covered = percent(record.interval_coverage)
    head = ["setting", "measure", *SIDES, f"candidate ÷ baseline ({covered})", "predicted"]
    tables: list[Table] = [("All figures (times with quartiles)", head, [[*cells] for cells in figures(record)])]
    off = [[setting(row), TITLES[measure], note.words] for row, measure, note in far_off(record)]
    if off:
        tables.append(("Predictions more than 20 % off", ["setting", "measure", "how far, and why"], off))
    return tables


def figures(record: Benchmark) -> list[list[str]]:
    """Return a row of text for each setting and measure."""
    rows = []
    for row in record.rows:
        lines = [_cache_row(kind, cache) for kind, cache in row.cache.kinds()]
        lines += [_time_row(TITLES[measure], time) for measure, time in row.times().items()]
        lines.append(_speed_row("dynamic", row.tokens_per_second.dynamic, row.tpot_dynamic))
        lines.append(_speed_row("static", row.tokens_per_second.static, row.tpot_static))
        lines += [_memory_row(row.peak_memory), _eager_row(row)]
        rows += [[setting(row), *cells] for cells in lines]
    return rows


def _overview_row(row: Row) -> list[str]:
    cache = row.cache.dynamic
    cached = f"{cache.ratio:.3f}x\n{size(cache.candidate)} / {size(cache.baseline)}"
    times = [_time_cell(time) for time in row.times().values()]
    return [str(row.context), str(row.batch), cached, *times, _memory_cell(row.peak_memory)]


def _time_cell(time: Comparison) -> str:
    both = " / ".join(duration(side.median) for side in time.sides())
    return f"{ratio(time)}\n{time.verdict}\n{both}"


def _memory_cell(peak: PeakMemory) -> str:
    if peak.reason is not None:
        return UNKNOWN
    sizes = [size(side) for side in peak.sides() if side is not None]
    return f"{UNKNOWN if peak.ratio is None else f'{peak.ratio:.2f}x'}\n{' / '.join(sizes)}"


def _cache_row(kind: str, cache: CacheBytes) -> list[str]:
    predicted = "" if cache.predicted_ratio is None else f"{cache.predicted_ratio:.3f}x"
    return [f"KV cache, {kind}, allocated", *map(size, cache.sides()), f"{cache.ratio:.3f}x", predicted]


def _time_row(title: str, time: Comparison) -> list[str]:
    cells = [title, *map(_with_quartiles, time.sides()), f"{ratio(time)} {time.verdict}"]
    if time.predicted_ratio is None:
        return [*cells, ""]
    seconds = [duration(side.predicted.seconds) for side in time.sides() if side.predicted is not None]
    far = " (more than 20 % off)" if time.notes else ""
    return [*cells, f"{time.predicted_ratio:.3f}x; {' and '.join(seconds)}{far}"]


def _with_quartiles(timing: Timing) -> str:
    low, high = timing.quartiles
    return f"{duration(timing.median)} ({duration(low)}-{duration(high)})"


def _speed_row(kind: str, speeds: Both[float], time: Comparison) -> list[str]:
    both = [f"{speed:.1f}" for speed in speeds.sides()]
    return [f"tokens/s, {kind} cache", *both, f"{1 / time.ratio:.3f}x", ""]


def _memory_row(peak: PeakMemory) -> list[str]:
    title = "peak memory above the weights"
    if peak.reason is not None:
        return [title, UNKNOWN, UNKNOWN, peak.reason, ""]
    sizes = [UNKNOWN if side is None else size(side) for side in peak.sides()]
    return [title, *sizes, "" if peak.ratio is None else f"{peak.ratio:.2f}x", ""]


def _eager_row(row: Row) -> list[str]:
    title = "time to first token, both eager"
    return [title, UNKNOWN, UNKNOWN, row.no_eager or "", ""] if row.eager is None else _time_row(title, row.eager)

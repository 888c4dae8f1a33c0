"""The sentences, tables, figures and headline of a bench, from its record alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crosslayer.benchmark.record import CLEAR, BenchRecord
from crosslayer.output.folder import whole_folder
from crosslayer.output.page import Table, page, save_page
from crosslayer.output.panel import COLORS, QUIET, Line, Panel, same_scale

TIMES = {
    "ttft": "time to first token",
    "tpot_dynamic": "time per token, dynamic cache",
    "tpot_static": "time per token, static cache",
}
SIDES = ("candidate", "baseline")
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def write_bench(record: dict[str, Any], out: Path, force: bool = False) -> Path:
    """Write a bench to `out`, whole or not at all; return the page's path."""
    checked = BenchRecord.model_validate(record)
    sides = {side: checked.settings.get(side, model["class"]) for side, model in checked.models.items()}
    settings, threads = checked.settings, checked.environment["machine"]["threads"]
    baseline = checked.models["baseline"]
    subtitle = (
        f"random tokens, {settings['new_tokens']} decoded after each prompt · {settings['repeats']} pairs of runs, in "
        f"turns · {baseline['dtype']} on {baseline['device']}, {threads} thread{'s' if threads > 1 else ''} · "
        f"{settings['attention']} attention"
    )
    panels, (head, rows) = figures(checked), overview(checked)
    lead: list[Table] = [(caption(checked), head, rows)]
    with whole_folder(out, force) as folder:
        title = f"Bench of {sides['candidate']} beside {sides['baseline']}"
        shown = cards(checked.rows[-1], checked.interval_coverage)
        text = page(title, subtitle, shown, sentences(checked), panels, _details(checked), lead)
        save_page(folder, text, record, panels)
    return out / "report.html"


def headline(record: BenchRecord) -> list[dict[str, Any]]:
    """Return the figures of every setting that the last line of the output holds."""
    return [
        {
            "context": row["context"],
            "batch": row["batch"],
            "cache": round(row["cache"]["dynamic"]["ratio"], 4),
            **{
                name: {"ratio": round(row[name]["ratio"], 3), "interval": _rounded(row[name]["interval"])}
                for name in TIMES
            },
        }
        for row in record.rows
    ]


def sentences(record: BenchRecord) -> list[str]:
    """Return what was found over all settings, a gain and a loss in the same words."""
    made = [_cache_words(record.rows), *(_time_words(record.rows, name) for name in TIMES), *_memory_words(record.rows)]
    made += [_pairs_words(record), *_prediction_words(record)]
    return made + [f"{_setting(skip)}: skipped, {skip['reason']}." for skip in record.skipped]


def _cache_words(rows: list[dict[str, Any]]) -> str:
    cached = _between([row["cache"]["dynamic"]["ratio"] for row in rows], 3)
    reads = [row["reads"]["ratio"] for row in rows if row["reads"] is not None]
    read = f"; a step reads {_between(reads, 2)} of its keys and values" if reads else ""
    return f"KV cache: {cached} of the baseline's bytes{read}."


def _time_words(rows: list[dict[str, Any]], name: str) -> str:
    """Return one sentence of a measure: in which settings the candidate is slower, faster or neither."""
    parts = []
    for word in ("faster", "slower", "undecided"):
        group = [row for row in rows if row[name]["verdict"] == word]
        if group:
            places = "in every setting" if len(group) == len(rows) > 1 else f"at {_listed(group)}"
            parts.append(f"{word} {places} ({_between([row[name]['ratio'] for row in group], 3)} of the baseline)")
    return f"{TIMES[name].capitalize()}: {'; '.join(parts)}."


def _memory_words(rows: list[dict[str, Any]]) -> list[str]:
    peaks = [row["peak_memory"] for row in rows]
    ratios = [peak["candidate"] / peak["baseline"] for peak in peaks if peak["reason"] is None and peak["baseline"]]
    made = [f"Peak memory above the weights: {_between(ratios, 2)} of the baseline."] if ratios else []
    return made + [f"Peak memory: {reason}." for reason in dict.fromkeys(p["reason"] for p in peaks if p["reason"])]


def _pairs_words(record: BenchRecord) -> str:
    pairs, covered = record.settings["repeats"], percent(record.interval_coverage)
    if pairs < 3:
        return "Fewer than three pairs of runs give no interval, so nothing is called faster or slower."
    words = (
        f"A ratio is the median of {pairs} pairs of runs, its interval reaches from pair to pair and covers {covered}"
    )
    if record.interval_coverage < CLEAR:
        return f"{words}: too little to call anything faster or slower; five pairs are enough."
    return f"{words}. Faster or slower is only what has an interval without 1."


def _prediction_words(record: BenchRecord) -> list[str]:
    if record.no_prediction:
        return [f"{record.no_prediction[:1].upper()}{record.no_prediction[1:]}."]
    off = _off(record)
    if not off:
        return ["Every prediction is within 20 % of what was measured."]
    row, name, note = max(off, key=lambda entry: abs(entry[2]["off"]))
    figures = 3 * len(TIMES) * len(record.rows)  # of each time: both sides and the ratio
    return [
        f"{len(off)} of {figures} predictions are more than 20 % off; the farthest, {TIMES[name]} at {_short(row)}: "
        f"{note['words']}."
    ]


def _off(record: BenchRecord) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Return row, measure and note of every prediction that is more than 20 % off."""
    return [(row, name, note) for row in record.rows for name in TIMES for note in row[name]["notes"]]


def caption(record: BenchRecord) -> str:
    """Return what the overview shows."""
    return (
        f"Candidate ÷ baseline, and below it their own figures (median of {record.settings['repeats']} pairs of runs)"
    )


def overview(record: BenchRecord) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the short table: a row for each context and batch size."""
    covered = f"{percent(record.interval_coverage)} interval" if record.interval_coverage else "no interval"
    times = [f"{name}\n({covered})".replace(", ", ",\n") for name in TIMES.values()]
    head = ["context", "batch", "KV cache", *times, "peak memory"]
    rows = []
    for row in record.rows:
        cache, memory = row["cache"]["dynamic"], row["peak_memory"]
        cells = [f"{cache['ratio']:.3f}x\n{size(cache['candidate'])} / {size(cache['baseline'])}"]
        cells += [_time_cell(row[name]) for name in TIMES]
        ratio = f"{memory['candidate'] / memory['baseline']:.2f}x" if memory["baseline"] else "–"
        sizes = [size(memory[side]) for side in SIDES if memory[side] is not None]
        cells.append("–" if memory["reason"] else f"{ratio}\n{' / '.join(sizes)}")
        rows.append([str(row["context"]), str(row["batch"]), *cells])
    return head, rows


def _time_cell(time: dict[str, Any]) -> str:
    both = " / ".join(duration(time[side]["median"]) for side in SIDES)
    return f"{time['ratio']:.3f}x{_span(time)}\n{time['verdict']}\n{both}"


def show(record: BenchRecord) -> None:
    """Print the overview; where the output is no terminal, as wide as it is."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as Grid

    head, rows = overview(record)
    grid = Grid(*head, show_lines=True)
    for cells in rows:
        grid.add_row(*cells)
    console, wide = Console(), Console(width=1000)
    fitting = Console(width=Measurement.get(wide, wide.options, grid).maximum)
    console.print(caption(record), soft_wrap=True)
    (console if console.is_terminal else fitting).print(grid)


def _details(record: BenchRecord) -> list[Table]:
    """Return the long tables of the page: every figure, and where a prediction is off."""
    covered = percent(record.interval_coverage)
    head = ["setting", "measure", *SIDES, f"candidate ÷ baseline ({covered})", "predicted"]
    made: list[Table] = [("All figures (times with quartiles)", head, [[*row] for row in table(record)])]
    off: list[list[Any]] = [[_setting(row), TIMES[name], note["words"]] for row, name, note in _off(record)]
    return [*made, ("Predictions more than 20 % off", ["setting", "measure", "how far, and why"], off)] if off else made


def table(record: BenchRecord) -> list[list[str]]:
    """Return a row of text for each setting and measure."""
    made = []
    for row in record.rows:
        lines = [*_cache_rows(row), *(_time_row(row[name], name_of) for name, name_of in TIMES.items())]
        lines += [*_rate_rows(row), _memory_row(row["peak_memory"]), _eager_row(row["eager"])]
        made += [[_setting(row), *cells] for cells in lines]
    return made


def _cache_rows(row: dict[str, Any]) -> Iterable[list[str]]:
    for kind, cache in row["cache"].items():
        predicted = "" if cache["predicted_ratio"] is None else f"{cache['predicted_ratio']:.3f}x"
        sizes = [size(cache["candidate"]), size(cache["baseline"])]
        yield [f"KV cache, {kind}, allocated", *sizes, f"{cache['ratio']:.3f}x", predicted]


def _time_row(time: dict[str, Any], name: str) -> list[str]:
    cells = [name]
    for side in SIDES:
        low, high = time[side]["quartiles"]
        cells.append(f"{duration(time[side]['median'])} ({duration(low)}-{duration(high)})")
    cells.append(f"{time['ratio']:.3f}x{_span(time)} {time['verdict']}")
    if time.get("predicted_ratio") is None:
        return [*cells, ""]
    seconds = [duration(time[side]["predicted"]["seconds"]) for side in SIDES]
    far = " (more than 20 % off)" if time["notes"] else ""
    return [*cells, f"{time['predicted_ratio']:.3f}x; {' and '.join(seconds)}{far}"]


def _rate_rows(row: dict[str, Any]) -> Iterable[list[str]]:
    for kind, rates in row["tokens_per_second"].items():
        ratio = 1 / row[f"tpot_{kind}"]["ratio"]
        yield [f"tokens/s, {kind} cache", f"{rates['candidate']:.1f}", f"{rates['baseline']:.1f}", f"{ratio:.3f}x", ""]


def _memory_row(memory: dict[str, Any]) -> list[str]:
    if memory["reason"]:
        return ["peak memory above the weights", "–", "–", memory["reason"], ""]
    ratio = memory["candidate"] / memory["baseline"] if memory["baseline"] else None
    sizes = [size(memory["candidate"]), size(memory["baseline"])]
    return ["peak memory above the weights", *sizes, "" if ratio is None else f"{ratio:.2f}x", ""]


def _eager_row(eager: dict[str, Any]) -> list[str]:
    name = "time to first token, both eager"
    return [name, "–", "–", eager["skipped"], ""] if "skipped" in eager else _time_row(eager, name)


def cards(row: dict[str, Any], covered: float) -> list[tuple[str, str, str]]:
    """Return the large figures of one setting."""
    cache, made = row["cache"]["dynamic"], []
    made.append(("KV cache", f"{cache['ratio']:.1%}", f"of the baseline's bytes, {_setting(row)}"))
    for name, name_of in TIMES.items():
        interval = row[name]["interval"]
        span = "no interval" if interval is None else f"{percent(covered)}: {interval[0]:.2f}-{interval[1]:.2f}"
        note = f"{span}, {row[name]['verdict']}, {_setting(row)}"
        made.append((name_of.capitalize(), f"{row[name]['ratio']:.2f}x", note))
    return made


def figures(record: BenchRecord) -> list[Panel]:
    """Return, for each batch size, the ratios by context, and the time per token as measured and as predicted."""
    ratios, predictions = [], []
    for batch in dict.fromkeys(row["batch"] for row in record.rows):
        group = sorted((row for row in record.rows if row["batch"] == batch), key=lambda row: row["context"])
        ratios.append(_ratios(group, batch, record.interval_coverage))
        if all(row["rates"] is not None for row in group):
            predictions.append(_prediction(group, batch))
    pairs = zip(same_scale(ratios), same_scale(predictions) or [None] * len(ratios), strict=True)
    return [panel for pair in pairs for panel in pair if panel is not None]


def _ratios(group: list[dict[str, Any]], batch: int, covered: float) -> Panel:
    x, ticks = _contexts(group)
    lines = [_ratio_line(group, x, name) for name in TIMES]
    lines.append(Line("KV cache", x, [row["cache"]["dynamic"]["ratio"] for row in group]))
    bands = f" Bands: {percent(covered)} intervals of the median." if covered else ""
    words = f"Below 1 the candidate needs less.{bands}"
    title, titles = f"Ratios by context, batch {batch}", ("context (tokens)", "candidate ÷ baseline")
    return Panel(f"ratios_batch_{batch}", title, words, *titles, lines, log_x=len(x) > 1, x_ticks=ticks)


def _contexts(group: list[dict[str, Any]]) -> tuple[list[float], dict[float, str]]:
    x = [float(row["context"]) for row in group]
    return x, {context: f"{context:g}" for context in x}


def _ratio_line(group: list[dict[str, Any]], x: list[float], name: str) -> Line:
    intervals = [row[name]["interval"] for row in group]
    low, high = (None if None in intervals else [interval[end] for interval in intervals] for end in (0, 1))
    return Line(TIMES[name], x, [row[name]["ratio"] for row in group], low, high)


def _prediction(group: list[dict[str, Any]], batch: int) -> Panel:
    (x, ticks), lines = _contexts(group), []
    for side, color in zip(SIDES, (COLORS[0], QUIET), strict=True):
        times = [row["tpot_dynamic"][side] for row in group]
        predicted = [1e3 * time["predicted"]["seconds"] for time in times]
        lines.append(Line(f"{side}, measured", x, [1e3 * time["median"] for time in times], color=color))
        lines.append(Line(f"{side}, predicted", x, predicted, color=color, dashed=True))
    words = "Dynamic cache. Predicted from bytes read and copied and the machine's own rates in this run."
    title, titles = f"Time per token, batch {batch}", ("context (tokens)", "milliseconds a token")
    return Panel(f"prediction_batch_{batch}", title, words, *titles, lines, log_x=len(x) > 1, x_ticks=ticks)


def percent(share: float) -> str:
    """Write a share with three digits: 93.8 %."""
    return f"{100 * share:.3g} %"


def size(count: float) -> str:
    """Write a number of bytes with three digits: 23.6 MB."""
    unit = next((name for name in reversed(UNITS) if count >= UNITS[name]), "B")
    return f"{count / UNITS[unit]:.3g} {unit}"


def duration(seconds: float) -> str:
    """Write seconds with three digits, below one as milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _setting(row: dict[str, Any]) -> str:
    return f"context {row['context']}, batch {row['batch']}"


def _short(row: dict[str, Any]) -> str:
    return f"{row['context']} × {row['batch']}"


def _listed(rows: list[dict[str, Any]]) -> str:
    """Name settings: context × batch = 512 × 1, 512 × 4."""
    return f"context × batch = {', '.join(map(_short, rows))}"


def _span(time: dict[str, Any]) -> str:
    interval = time["interval"]
    return "" if interval is None else f" ({interval[0]:.3f}-{interval[1]:.3f})"


def _between(values: list[float], digits: int) -> str:
    """Write the range of ratios: 0.85x, or 0.85x to 0.97x."""
    low, high = (f"{end:.{digits}f}x" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _rounded(interval: list[float] | None) -> list[float] | None:
    return None if interval is None else [round(end, 3) for end in interval]

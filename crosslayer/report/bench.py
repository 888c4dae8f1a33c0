"""The sentences, table, figures and headline of a bench, from its record alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crosslayer.report.page import Table, page, save_page
from crosslayer.report.panel import Line, Panel
from crosslayer.report.record import BenchRecord, whole_folder

TIMES = {
    "ttft": "time to first token",
    "tpot_dynamic": "time per token, dynamic cache",
    "tpot_static": "time per token, static cache",
}
HEAD = ["setting", "measure", "candidate", "baseline", "candidate ÷ baseline (95 %)", "predicted"]
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def write_bench(record: dict[str, Any], out: Path, force: bool = False) -> Path:
    """Write a bench to `out`, whole or not at all; return the page's path."""
    checked = BenchRecord.model_validate(record)
    sides = {side: checked.settings.get(side, model["class"]) for side, model in checked.models.items()}
    machine = checked.environment["machine"]
    subtitle = (
        f"{checked.models['baseline']['dtype']} on {checked.models['baseline']['device']}, {machine['threads']} "
        f"threads · {checked.settings['attention']} attention · {checked.settings['repeats']} pairs of runs, in turns"
    )
    panels, rows = figures(checked.rows), table(checked)
    shown: Table = ("All figures", HEAD, [[*row] for row in rows])
    with whole_folder(out, force) as folder:
        title = f"Bench of {sides['candidate']} beside {sides['baseline']}"
        text = page(title, subtitle, cards(checked.rows[-1]), sentences(checked), panels, [shown])
        save_page(folder, text, record, panels)
    return out / "report.html"


def headline(record: BenchRecord) -> list[dict[str, Any]]:
    """Return the figures of every setting that the last line of the output holds."""
    return [
        {
            "context": row["context"],
            "batch": row["batch"],
            "cache": round(row["cache"]["dynamic"]["ratio"], 4),
            **{name: {"ratio": round(row[name]["ratio"], 3), "ci95": _rounded(row[name]["ci95"])} for name in TIMES},
        }
        for row in record.rows
    ]


def sentences(record: BenchRecord) -> list[str]:
    """Return what was found, a gain and a loss in the same words."""
    found = []
    for row in record.rows:
        cache, reads = row["cache"]["dynamic"], row["reads"]
        read = "" if reads is None else f"; a step reads {reads['ratio']:.2f}x of its keys and values"
        found.append(
            f"{_setting(row)}: the KV cache takes {cache['ratio']:.3f}x of the baseline's bytes "
            f"({size(cache['candidate'])}, baseline {size(cache['baseline'])}){read}."
        )
        found += [f"{_setting(row)}: {name_of}: {_verdict(row[name])}." for name, name_of in TIMES.items()]
        memory = row["peak_memory"]
        if memory["reason"] is None and memory["baseline"]:
            ratio = memory["candidate"] / memory["baseline"]
            found.append(f"{_setting(row)}: peak memory above the weights: {ratio:.2f}x of the baseline.")
        found += [f"{_setting(row)}: {TIMES[name]}: {note}." for name in TIMES for note in row[name]["notes"]]
    found += [f"{_setting(skip)}: skipped, {skip['reason']}." for skip in record.skipped]
    if record.no_prediction:
        found.append(f"{record.no_prediction}.")
    pairs, most = record.settings["repeats"], record.interval_coverage
    if pairs < 3:
        found.append("Fewer than three pairs of runs give no interval.")
    elif most < 0.95:
        found.append(f"An interval from {pairs} pairs covers {most:.0%} at most, not 95 %; 6 or more pairs do.")
    return found


def _verdict(time: dict[str, Any]) -> str:
    interval = time["ci95"]
    span = "no interval" if interval is None else f"{interval[0]:.3f}-{interval[1]:.3f}"
    holds = time["verdict"] == "undecided" and interval is not None
    word = "undecided: the interval holds 1" if holds else time["verdict"]
    predicted = "" if time["predicted_ratio"] is None else f"; predicted {time['predicted_ratio']:.2f}x"
    return f"{time['ratio']:.3f}x ({span}) of the baseline, {word}{predicted}"


def table(record: BenchRecord) -> list[list[str]]:
    """Return a row of text for each setting and measure, as `HEAD` names the columns."""
    found = []
    for row in record.rows:
        made = [
            *_cache_rows(row),
            *(_time_row(row[name], name_of) for name, name_of in TIMES.items()),
            *_rate_rows(row),
        ]
        made += [_memory_row(row["peak_memory"]), _eager_row(row["eager"])]
        found += [[_setting(row) if number == 0 else "", *cells] for number, cells in enumerate(made)]
    return found


def show(record: BenchRecord) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table as Grid

    grid = Grid(*HEAD)
    for cells in table(record):
        if cells[0] and grid.row_count:
            grid.add_section()
        grid.add_row(*cells)
    Console().print(grid)


def _cache_rows(row: dict[str, Any]) -> Iterable[list[str]]:
    for kind, cache in row["cache"].items():
        predicted = "" if cache["predicted_ratio"] is None else f"{cache['predicted_ratio']:.3f}x"
        sizes = [size(cache["candidate"]), size(cache["baseline"])]
        yield [f"KV cache, {kind}, allocated", *sizes, f"{cache['ratio']:.3f}x", predicted]


def _time_row(time: dict[str, Any], name: str) -> list[str]:
    cells = [name]
    for side in ("candidate", "baseline"):
        low, high = time[side]["quartiles"]
        cells.append(f"{duration(time[side]['median'])} ({duration(low)}-{duration(high)})")
    interval = time["ci95"]
    span = "" if interval is None else f" ({interval[0]:.3f}-{interval[1]:.3f})"
    cells.append(f"{time['ratio']:.3f}x{span} {time['verdict']}")
    if time.get("predicted_ratio") is None:
        return [*cells, ""]
    seconds = [duration(time[side]["predicted"]["seconds"]) for side in ("candidate", "baseline")]
    far = " (off by over 20 %: see the words)" if time["notes"] else ""
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


def cards(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the large figures of one setting."""
    cache, made = row["cache"]["dynamic"], []
    made.append(("KV cache", f"{cache['ratio']:.1%}", f"of the baseline's bytes, {_setting(row)}"))
    for name, name_of in TIMES.items():
        interval = row[name]["ci95"]
        span = "no interval" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"
        made.append((name_of, f"{row[name]['ratio']:.2f}x", f"{span}, {row[name]['verdict']}, {_setting(row)}"))
    return made


def figures(rows: list[dict[str, Any]]) -> list[Panel]:
    """Return, for each batch size, the ratios by context, and the time per token as measured and as predicted."""
    made = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        group = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["context"])
        x = [row["context"] for row in group]
        lines = [_ratio_line(group, x, name) for name in TIMES]
        lines.append(Line("KV cache", x, [row["cache"]["dynamic"]["ratio"] for row in group]))
        words = f"Batch {batch}. Below 1 the candidate needs less. Bands: 95 % bootstrap intervals of the median."
        titles = ("context (tokens)", "candidate ÷ baseline")
        made.append(Panel(f"ratios_batch_{batch}", "Ratios by context", words, *titles, lines, log_x=len(x) > 1))
        if all(row["rates"] is not None for row in group):
            made.append(_prediction(group, x, batch))
    return made


def _ratio_line(group: list[dict[str, Any]], x: list[float], name: str) -> Line:
    bands: list[list[float | None]] = [
        [row[name]["ci95"][end] if row[name]["ci95"] else None for row in group] for end in (0, 1)
    ]
    known = None not in bands[0]
    y = [row[name]["ratio"] for row in group]
    return Line(TIMES[name], x, y, bands[0] if known else None, bands[1] if known else None)


def _prediction(group: list[dict[str, Any]], x: list[float], batch: int) -> Panel:
    lines = []
    for side in ("candidate", "baseline"):
        times = [row["tpot_dynamic"][side] for row in group]
        lines.append(Line(f"{side}, measured", x, [1e3 * time["median"] for time in times]))
        lines.append(Line(f"{side}, predicted", x, [1e3 * time["predicted"]["seconds"] for time in times]))
    words = (
        f"Batch {batch}, dynamic cache. Predicted from bytes read and copied and the machine's own rates in this run."
    )
    titles = ("context (tokens)", "milliseconds a token")
    return Panel(f"prediction_batch_{batch}", "Time per token", words, *titles, lines, log_x=len(x) > 1)


def size(count: float) -> str:
    """Write a number of bytes with three digits: 23.6 MB."""
    unit = next((name for name in reversed(UNITS) if count >= UNITS[name]), "B")
    return f"{count / UNITS[unit]:.3g} {unit}"


def duration(seconds: float) -> str:
    """Write seconds with three digits, below one as milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _setting(row: dict[str, Any]) -> str:
    return f"context {row['context']}, batch {row['batch']}"


def _rounded(interval: list[float] | None) -> list[float] | None:
    return None if interval is None else [round(end, 3) for end in interval]

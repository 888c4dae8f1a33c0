"""The page of a benchmark, from its record alone: a short table, sentences, ratios and times by context."""

from collections.abc import Sequence
from typing import Any

from crosslayer.cache.running import CacheOptions
from crosslayer.judge.clock import TIMES
from crosslayer.judge.page import by_verdict, failures, listing, models_table, span
from crosslayer.judge.report import Row
from crosslayer.output.chart import same_scale
from crosslayer.output.formatting import UNKNOWN, Table, percent
from crosslayer.output.page import Cell, Page
from crosslayer.output.panel import COLORS, QUIET, Line, Panel
from crosslayer.stats.times import FEWEST, coverage
from crosslayer.verbs.bench.result import Benchmark

NOISY = 0.2  # the spread of equal runs above which the machine was busy
TOO_FEW = f"too few pairs for an interval: it needs {FEWEST} (--repeats {FEWEST})"


def covered(pairs: int) -> str:
    """Name the interval that this number of pairs gives: 93.8% interval, or no interval."""
    return f"{percent(coverage(pairs), 1)} interval" if pairs >= FEWEST else "no interval"


def layout(record: Benchmark) -> Page:
    """Return the page."""
    settings, threads = record.settings, record.environment.machine.threads
    candidate, original = record.models
    assert original.model is not None
    return Page(
        title=f"Benchmark of {candidate.name} against {original.name}",
        subtitle=(
            f"random tokens, {settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of alternating "
            f"runs · {original.model.dtype} on {original.model.device}, {threads} thread{'s' if threads > 1 else ''} · "
            f"{' and '.join(settings.attention)} attention"
        ),
        cards=_cards(record),
        sentences=sentences(record),
        panels=_panels(record),
        tables=[
            listing("All measurements", record.rows, {"stored": "bytes\nas stored"}, "configuration"),
            models_table(record),
        ],
        lead=[overview(record)],
    )


def _cards(record: Benchmark) -> list[tuple[str, str, str]]:
    """Return the cards of the last configuration: the size of the cache, and times."""
    last, titles = record.rows[-1].scope, {"bytes": "KV cache", **TIMES}
    cards = []
    for row in record.rows:
        if row.scope == last and row.quantity in titles and row.change is not None:
            figure, _, interval = row.change_text().partition(" ")
            cards.append((titles[row.quantity], figure, f"{interval} {row.verdict}; {last}".strip()))
    return cards


def sentences(record: Benchmark) -> list[str]:
    """Return what was measured over all configurations; gains and losses are worded alike."""
    pairs = record.settings.repeats
    rule = "a candidate counts as faster or slower only where the interval excludes 1"
    times = [row for row in record.rows if row.quantity in TIMES]
    return [
        _verdict(record),
        *by_verdict(times),
        *_softmax_sentences(record.rows_of("softmax share")),
        f"Each ratio is the median of {pairs} pair{'s' if pairs > 1 else ''} of runs ({covered(pairs)}); "
        f"{TOO_FEW if pairs < FEWEST else rule}.",
        *_noise_sentences(times),
        *failures(record),
        *CacheOptions(record.settings.evict, record.settings.kv_bits).sentences(),
        *(f"Skipped: {reason}." for reason in record.skipped),
    ]


def overview(record: Benchmark) -> Table:
    """Return the short table: a row for each configuration, with ratios and both medians."""
    quantities = {"bytes": "KV cache\n(of the 16-bit cache)", **TIMES, "peak memory": "peak memory"}
    shown = {name: title for name, title in quantities.items() if record.rows_of(name)}
    cells: list[list[Cell]] = []
    for scope in dict.fromkeys(row.scope for row in record.rows):
        rows = [record.row(record.candidates[0].name, name, scope) for name in shown]
        cells.append([scope, *(_cell(row) for row in rows)])
    title = f"Candidate ÷ baseline ({covered(record.settings.repeats)}); below it candidate / baseline"
    return title, ["configuration", *(title.replace(", ", ",\n") for title in shown.values())], cells


def _cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return UNKNOWN
    verdict = f"\n{row.verdict}" if row.unit == "s" else ""
    return f"{row.change_text()}{verdict}\n{row.text(row.value)} / {row.text(row.original)}"


def _verdict(record: Benchmark) -> str:
    spans = {title: span(record.rows_of(name)) for name, title in TIMES.items() if record.rows_of(name)}
    times = "; ".join(f"{title} {ends}" for title, ends in spans.items())
    return f"KV cache: {span(record.rows_of('bytes'))} of the baseline's 16-bit cache. {times[:1].upper()}{times[1:]}."


def _softmax_sentences(rows: Sequence[Row]) -> list[str]:
    """Return how much of a prompt's time softmax takes with eager attention."""
    if not rows:
        return []
    spans = []
    for shares in ([row.value for row in rows], [row.original for row in rows]):
        ends = [percent(end(share for share in shares if share is not None), 0) for end in (min, max)]
        spans.append(" to ".join(dict.fromkeys(ends)))
    return [f"With eager attention softmax takes {spans[0]} of the time to first token, in the baseline {spans[1]}."]


def _noise_sentences(rows: Sequence[Row]) -> list[str]:
    """Return how far apart equal runs are, where that is more than a fifth."""
    worst = max(rows, key=lambda row: row.details["spread"])
    if float(worst.details["spread"]) <= NOISY:
        return []
    apart = percent(float(worst.details["spread"]))
    where = f"{TIMES[worst.quantity]} at {worst.scope}"
    return [f"Equal runs vary: {where} has quartiles {apart} apart, so the machine was probably busy."]


def _panels(record: Benchmark) -> list[Panel]:
    """Return the figures of each batch size and attention: ratios, and time per token."""
    groups: dict[str, dict[float, str]] = {}  # by batch and attention: scope of each context
    for scope in dict.fromkeys(row.scope for row in record.rows):
        context, rest = scope.removeprefix("context ").split(", ", 1)
        groups.setdefault(rest, {})[float(context)] = scope
    ratios, times = [], []
    for rest, scopes in groups.items():
        scopes = dict(sorted(scopes.items()))
        ratios.append(_ratios(record, rest, scopes))
        times.append(_times(record, rest, scopes))
    return [panel for pair in zip(same_scale(ratios), same_scale(times), strict=True) for panel in pair]


def _ratios(record: Benchmark, group: str, scopes: dict[float, str]) -> Panel:
    lines, interval = [], covered(record.settings.repeats)
    for name, title in (*TIMES.items(), ("bytes", "KV cache, in 16 bits")):
        changes = [row.change for row in _rows(record, name, scopes) if row.change is not None]
        intervals = [change.interval for change in changes if change.interval is not None and name in TIMES]
        low, high = zip(*intervals, strict=True) if len(intervals) == len(changes) else (None, None)
        lines.append(Line(title, [*scopes], [change.value for change in changes], low, high))
    caption = f"Below 1 the candidate needs less time or memory. Bars, side by side: {interval} of the median ratio."
    return _panel("ratios", "Ratios by context", caption, "candidate ÷ baseline", group, lines, log_y=True)


def _times(record: Benchmark, group: str, scopes: dict[float, str]) -> Panel:
    rows = _rows(record, "tpot_dynamic", scopes)
    medians = {"candidate": [row.value for row in rows], "baseline": [row.original for row in rows]}
    lines = []
    for (name, values), color in zip(medians.items(), (COLORS[0], QUIET), strict=True):
        lines.append(Line(name, [*scopes], [1e3 * value for value in values if value is not None], color=color))
    caption = "Dynamic cache; medians over runs."
    return _panel("times", "Time per token", caption, "milliseconds per token", group, lines)


def _rows(record: Benchmark, quantity: str, scopes: dict[float, str]) -> list[Row]:
    """Return the rows of a quantity at some configurations."""
    rows = [record.row(record.candidates[0].name, quantity, scope) for scope in scopes.values()]
    return [row for row in rows if row is not None]


def _panel(key: str, title: str, caption: str, axis: str, group: str, lines: list[Line], **look: Any) -> Panel:
    ticks = {context: f"{context:.0f}" for context in lines[0].x}
    name = f"{key}_{group.replace(', ', '_').replace(' ', '_')}"
    look |= {"log_x": len(ticks) > 1, "bars": True}
    return Panel(name, f"{title}, {group}", caption, "context (tokens)", axis, lines, x_ticks=ticks, **look)

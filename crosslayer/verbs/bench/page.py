"""The page of a benchmark, from its record alone: a short table, ratios and times by context, all measurements."""

from crosslayer.output.formatting import UNKNOWN, readable_bytes
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, QUIET, Line, Panel, same_scale
from crosslayer.verbs.bench.record import MEASURES, ROLES, Row
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.sentences import TITLES, configuration, covered, sentences
from crosslayer.wiring.kv_bits import RECENT


def layout(record: Benchmark) -> Page:
    """Return the page."""
    settings, baseline, threads = record.settings, record.models.baseline, record.environment.machine.threads
    last = record.rows[-1]
    cards = [("KV cache", f"{last.cache.dynamic.share:.1%}", f"of the baseline's 16-bit cache; {configuration(last)}")]
    for measure, time in last.times().items():
        note = f"{time.speed} ({covered(settings.repeats)}); {configuration(last)}"
        cards.append((TITLES[measure].capitalize(), time.change.text(2, unit="x"), note))
    return Page(
        title=f"Benchmark of {record.models.candidate.name} against {baseline.name}",
        subtitle=(
            f"random tokens, {settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of alternating "
            f"runs · {baseline.dtype} on {baseline.device}, {threads} thread{'s' if threads > 1 else ''} · "
            f"{' and '.join(settings.attention)} attention"
        ),
        cards=cards,
        sentences=sentences(record),
        panels=_panels(record),
        tables=_details(record),
        lead=[overview(record)],
    )


def overview(record: Benchmark) -> Table:
    """Return the short table: a row for each context and batch size."""
    interval = covered(record.settings.repeats)
    heads = [f"{title}\n(ratio, {interval})".replace(", ", ",\n", title.count(", ")) for title in TITLES.values()]
    title = f"Candidate ÷ baseline; below it candidate / baseline (median of {record.settings.repeats} pairs of runs)"
    rows = []
    for row in record.rows:
        cache, peak = row.cache.dynamic, row.peak_memory
        cells = [f"{cache.share:.1%}\n{readable_bytes(cache.candidate)} / {readable_bytes(cache.baseline)}"]
        cells += [f"{time.change.text(unit='x')}\n{time.speed}\n{time.durations()}" for time in row.times().values()]
        sizes = " / ".join(readable_bytes(count) for count in peak.both() if count is not None)
        cells.append(UNKNOWN if peak.ratio is None else f"{peak.ratio:.2f}x\n{sizes}")
        rows.append([str(row.context), str(row.batch), row.attention, *cells])
    return (
        title,
        ["context", "batch", "attention", "KV cache\n(of the 16-bit cache;\nallocated)", *heads, "peak memory"],
        rows,
    )


def _details(record: Benchmark) -> list[Table]:
    heads = [f"{role}\n(median, quartiles)" for role in ROLES]
    ratio = f"candidate ÷ baseline\n(median, {covered(record.settings.repeats)})"
    head = ["configuration", "measure", *heads, ratio]
    tables: list[Table] = [("All measurements", head, measurements(record))]
    quantised = []
    for row in record.rows:
        for one in row.quantised:
            shares = ((one.baseline_ratio, one.baseline), (one.ratio, one.candidate))
            cells = [f"{share:.1%}\n{readable_bytes(count)}" for share, count in shares]
            quantised.append([configuration(row), one.kind, *cells])
    if quantised:
        title = (
            "With fewer bits (of the baseline's 16-bit cache; below 8 the first token and the latest "
            f"{RECENT} stay exact; `--kv-bits` measures the time)"
        )
        tables.append((title, ["configuration", "type", "baseline", "candidate"], quantised))
    return tables


def measurements(record: Benchmark) -> list[list[str]]:
    """Return a row of text for each configuration and measure."""
    rows = []
    for row in record.rows:
        lines = []
        for kind, cache in row.cache:
            lines.append([f"KV cache, {kind}, allocated", *map(readable_bytes, cache.both()), f"{cache.ratio:.3f}x"])
            lines.append([f"KV cache, {kind}, of the baseline's 16-bit cache", "", "", f"{cache.share:.1%}"])
        for measure, time in row.times().items():
            lines.append([TITLES[measure], *(timing.text() for timing in time.both()), time.text()])
        for kind, time in (("dynamic", row.tpot_dynamic), ("static", row.tpot_static)):
            speeds = [f"{row.batch / timing.median:.1f}" for timing in time.both()]
            lines.append([f"tokens/s, {kind} cache", *speeds, f"{1 / time.change.value:.3f}x"])
        peak = row.peak_memory
        sizes = [UNKNOWN if count is None else readable_bytes(count) for count in peak.both()]
        compared = peak.reason or ("" if peak.ratio is None else f"{peak.ratio:.2f}x")
        lines.append(["peak memory above the weights", *sizes, compared])
        if row.softmax_share is not None:
            shares = [f"{share:.1%}" for share in row.softmax_share.both()]
            lines.append(["softmax, of the time to first token", *shares, ""])
        rows += [[configuration(row), *cells] for cells in lines]
    return rows


def _panels(record: Benchmark) -> list[Panel]:
    """Return the figures of each batch size and attention: ratios, and time per token."""
    ratios, times = [], []
    for kind in dict.fromkeys((row.batch, row.attention) for row in record.rows):
        group = sorted((row for row in record.rows if (row.batch, row.attention) == kind), key=lambda row: row.context)
        ratios.append(_ratios(group, covered(record.settings.repeats)))
        times.append(_times(group))
    return [panel for pair in zip(same_scale(ratios), same_scale(times), strict=True) for panel in pair]


def _ratios(group: list[Row], interval: str) -> Panel:
    x, lines = [float(row.context) for row in group], []
    for measure in MEASURES:
        times = [row.times()[measure] for row in group]
        intervals = [time.change.interval for time in times if time.change.interval is not None]
        low, high = zip(*intervals, strict=True) if len(intervals) == len(times) else (None, None)
        lines.append(Line(f"{TITLES[measure]} ({interval})", x, [time.change.value for time in times], low, high))
    lines.append(Line("KV cache, in 16 bits", x, [row.cache.dynamic.share for row in group]))
    caption = f"Below 1 the candidate needs less time or memory. Bars, side by side: {interval} of the median ratio."
    return _panel("ratios", "Ratios by context", caption, "candidate ÷ baseline", group, lines)


def _times(group: list[Row]) -> Panel:
    x, lines = [float(row.context) for row in group], []
    for index, color in enumerate((COLORS[0], QUIET)):
        timings = [row.tpot_dynamic.both()[index] for row in group]
        medians = [1e3 * timing.median for timing in timings]
        low, high = zip(*([1e3 * end for end in timing.quartiles] for timing in timings), strict=True)
        lines.append(Line(f"{ROLES[index]} (quartiles)", x, medians, low, high, color=color))
    caption = "Dynamic cache; error bars, drawn side by side: quartiles over runs."
    return _panel("times", "Time per token", caption, "milliseconds per token", group, lines)


def _panel(key: str, title: str, caption: str, axis: str, group: list[Row], lines: list[Line]) -> Panel:
    batch, attention, ticks = (
        group[0].batch,
        group[0].attention,
        {float(row.context): str(row.context) for row in group},
    )
    heading, titles, log_x = f"{title}, batch {batch}, {attention}", ("context (tokens)", axis), len(group) > 1
    return Panel(
        f"{key}_batch_{batch}_{attention}", heading, caption, *titles, lines, log_x=log_x, bars=True, x_ticks=ticks
    )

"""Tables and sentences that the pages of all comparisons have in common."""

from collections.abc import Callable, Iterable, Sequence

from crosslayer.judge.clock import TIMES
from crosslayer.judge.report import ALL, Against, Report, Row
from crosslayer.judge.rows import RETRIEVAL
from crosslayer.output.formatting import UNKNOWN, Table, listed
from crosslayer.output.page import Cell, Mark
from crosslayer.output.panel import QUIET, Dots, Line, Panel
from crosslayer.stats.differences import in_points
from crosslayer.stats.estimate import Estimate, band

KINDS = {True: "pass", False: "fail", None: "skip"}  # of a verdict's cell, by whether the candidate is better
NAMED = 6  # scopes that a sentence names at most


def listing(title: str, rows: Sequence[Row], details: dict[str, str] | None = None, of: str = "scope") -> Table:
    """Return a table with a line for each row.

    `details` are those of the rows' details that have a column, with its head; `of` is the head of the scopes.
    """
    details = details or {}
    candidates = {row.candidate for row in rows}
    compared = any(row.change is not None for row in rows)
    names = ["candidate"] if len(candidates) > 1 else []
    scopes = [of] if any(row.scope != ALL for row in rows) else []
    references = {row.against for row in rows}
    against = ["against"] if references != {Against.ORIGINAL} else []
    reference = ["compared with" if against else "original"] if compared else []
    head = [*names, *scopes, "quantity", *against, *reference, "candidate" if compared else "score"]
    head += ["change\n(95% interval)", "verdict", "interval over"] if compared else []
    cells = []
    for row in rows:
        cell: list[Cell] = [row.candidate] if names else []
        cell += [*([row.scope] if scopes else []), TIMES.get(row.quantity, row.quantity)]
        cell += [str(row.against)] if against else []
        cell += [row.text(row.original) or UNKNOWN] if compared else []
        cell.append(row.text(row.value) or UNKNOWN)
        if row.change is not None:
            cell += [row.change_text().replace(" (", "\n("), Mark(row.verdict, KINDS[row.is_better]), over(row.change)]
        elif compared:
            cell += [UNKNOWN, UNKNOWN, UNKNOWN]
        for name in details:
            value = row.details.get(name, UNKNOWN)
            cell.append(
                f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else value
            )
        cells.append(cell)
    return title, [*head, *details.values()], cells


def grid(
    title: str,
    rows: Sequence[Row],
    head: str,
    line: Callable[[Row], str],
    column: Callable[[Row], str],
    cell: Callable[[Row], Cell] = Row.change_text,
) -> Table:
    """Return a table with a cell for each row: `line` and `column` say where it goes, `head` is that of the lines."""
    lines, columns = dict.fromkeys(map(line, rows)), dict.fromkeys(map(column, rows))
    cells = {(line(row), column(row)): cell(row) for row in rows}
    body = [[one, *(cells.get((one, name), UNKNOWN) for name in columns)] for one in lines]
    return title, [head, *columns], body


def quantity_name(row: Row) -> str:
    """Return how a row's quantity is called, and what it is compared with, if that is not the original."""
    name = TIMES.get(row.quantity, row.quantity)
    if row.unit == "nats/token":
        name += ", nats/token"
    return name if row.against == Against.ORIGINAL else f"{name}, against {row.against}"


def found(row: Row) -> str:
    """Return what a short table shows of a row."""
    if row.change is None:
        return row.text(row.value) or UNKNOWN
    if row.unit == "bytes":
        return f"{row.change_text()} ({row.text(row.value)})"
    if row.quantity == RETRIEVAL:
        return f"{row.count(row.value)} (original {round((row.original or 0) * row.change.n)})"
    if row.unit == "share" and row.original:
        return f"{row.text(row.value)}: {row.change_text()} points"
    return row.change_text()


def retrieval_sentence(rows: Sequence[Row]) -> list[str]:
    """Return how many hidden numbers a candidate finds, of all and by length, compared with the original."""
    if not rows:
        return []
    whole, *lengths = rows
    assert whole.change is not None
    counts = ", ".join(str(row.hits) for row in lengths)
    sizes = ", ".join(row.scope.removesuffix(" tokens") for row in lengths)
    return [
        f"It retrieves {whole.hits} of {whole.change.n} numbers hidden in long texts ({counts} of "
        f"{lengths[0].details['samples']} at {sizes} tokens), the original "
        f"{whole.count(whole.original).partition(' ')[0]}: {in_points(whole.change).text(0, signed=True)} points, "
        "paired."
    ]


def over(change: Estimate) -> str:
    """Return what an interval is over: 16 windows, bootstrap."""
    if change.interval is None:
        return UNKNOWN
    return change.how if change.n == 1 else f"{change.n} {change.over}, {change.how}"


def by_verdict(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each quantity: at which scopes the candidate is lower or higher, and where neither is seen.

    Gains and losses are worded alike.
    """
    written = []
    for quantity in dict.fromkeys(row.quantity for row in rows):
        own = [row for row in rows if row.quantity == quantity and row.change is not None]
        clauses = []
        for verdict in sorted({row.verdict for row in own}):
            group = [row for row in own if row.verdict == verdict]
            verdict = verdict[0].upper() + verdict[1:]
            if [row.scope for row in group] == [ALL]:
                clauses.append(f"{verdict}, {group[0].change_text()}")
            elif len(group) == len(own) > NAMED:
                clauses.append(f"{verdict} everywhere, {span(group)}")
            else:
                named = [f"{row.scope} {row.change_text()}" for row in group[:NAMED]]
                more = f" and {len(group) - NAMED} more" if len(group) > NAMED else ""
                clauses.append(f"{verdict} at {'; '.join(named)}{more}")
        if clauses:
            title = TIMES.get(quantity, quantity)
            written.append(f"{title[0].upper()}{title[1:]}. {'. '.join(clauses)}.")
    return written


def span(rows: Sequence[Row]) -> str:
    """Return the smallest and the largest change of rows."""
    ends = sorted(rows, key=lambda row: 0.0 if row.change is None else row.change.value)
    return " to ".join(dict.fromkeys(row.change_text().partition(" (")[0] for row in (ends[0], ends[-1])))


def failures(report: Report) -> list[str]:
    """Return which candidates could not be measured, and which are not smaller than the original."""
    lines = [f"{one.name} could not be measured: {one.failed}." for one in report.candidates if one.failed]
    common = {one.name: one.details["common_tokens"] for one in report.candidates if "common_tokens" in one.details}
    for name, count in common.items():
        lines.append(
            f"The vocabularies of {name} and the original differ in size; KL is over their {count:,} common tokens."
        )
    rows = [row for row in report.rows_of("bytes") if row.change is not None and row.change.value >= 1]
    larger = list(dict.fromkeys(row.candidate for row in rows))
    if larger:
        lines.append(f"Not smaller than the original's 16-bit cache: {listed(larger)}.")
    return lines


def models_table(report: Report) -> Table:
    """Return the models with what is known of each."""
    rows = []
    for one in report.models:
        facts = one.model
        about = "" if facts is None else f"{facts.class_}, {facts.parameters / 1e6:.1f} M parameters, {facts.dtype}"
        details = "; ".join(
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in one.details.items()
        )
        role = "original" if one is report.original else "candidate"
        rows.append([role, one.name, about, details])
    return "Models", ["role", "name", "model", "details"], rows


def cards(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Return a card for each row that has a value: what it is, its figure, and the interval or the change."""
    made = []
    for row in rows:
        if row.value is None:
            continue
        title = quantity_name(row) if row.scope == ALL else f"{quantity_name(row)}, {row.scope}"
        if row.change is None:
            made.append((title, row.text(row.value), ""))
        elif row.unit == "share":
            made.append((title, row.text(row.value), f"{row.change_text()} points: {row.verdict}"))
        else:
            figure, _, interval = row.change_text().partition(" ")
            made.append((title, figure, f"{interval} {row.verdict}".strip()))
    return made


def change_panels(rows: Iterable[Row], key: str = "", interval: str = "95% intervals") -> list[Panel]:
    """Return the figures of changes: differences of shares in points, and how far ratios are from 1, in percent.

    `key` begins the names of the figures; `interval` says what the bars are.
    """
    compared = [row for row in rows if row.change is not None]
    differences = [row for row in compared if row.unit == "share"]
    ratios = [row for row in compared if row.change is not None and row.change.none == 1]
    panels = []
    for kind, axis, own in (("differences", "points", differences), ("ratios", "% above", ratios)):
        if own:
            names = {quantity_name(row) for row in own}
            title = min(names) if len(names) == 1 else kind
            sentence = f"Candidate − original: beyond 0 to the right the candidate is higher. Bars: {interval}."
            title = f"{title[0].upper()}{title[1:]}"
            panels.append(Panel(f"{key}{kind}", title, sentence, axis, "", dots=_dots(own, len(names) > 1)))
    return panels


def _dots(rows: Sequence[Row], named: bool) -> Dots:
    """Return how far the changes of rows are from none, in percent; `named`: with quantities, else scopes alone."""
    changes = [row.change for row in rows if row.change is not None]
    changes = [change.mapped(lambda value, none=change.none: 100 * (value - none)) for change in changes]
    parts = [row.scope.split(", ") for row in rows]  # of a configuration; those that all have in common say nothing
    common = set.intersection(*map(set, parts)) if len(rows) > 1 and not named else set()
    names = []
    for row, own in zip(rows, parts, strict=True):
        first, *others = [part for part in own if part not in common] or [row.scope]
        more = [*others, quantity_name(row)] if named else others
        names.append(f"{first} ({', '.join(more)})" if more else first)
    return Dots(names, *band(changes), single=[[] for _ in rows])


def bytes_and_kl(record: Report) -> list[Panel]:
    """Return the figure of bytes against KL, with those candidates joined that none beats in both."""
    damage, points = record.changes("KL"), []
    for candidate, size in record.changes("bytes").items():
        if candidate in damage:
            points.append((100 * size.value, damage[candidate], candidate))
    if not points:
        return []
    lines = [Line(name, [x], *band([kl])) for x, kl, name in points]
    front, best = [], float("inf")
    for x, kl, _ in sorted(points, key=lambda point: (point[0], point[1].value)):
        if kl.value < best:
            front.append((x, kl.value))
            best = kl.value
    if len(front) > 1:
        lines.insert(0, Line("not beaten", [x for x, _ in front], [y for _, y in front], dashed=True, color=QUIET))
    title, caption = "Bytes against damage", "Lower and further left is better; bars are 95% intervals over windows."
    axes = ("cache, % of the original in 16 bits", "KL, nats/token")
    log_y = all(kl.value > 1e-6 for _, kl, _ in points)
    return [Panel("bytes_and_kl", title, caption, *axes, lines, log_y=log_y, bars=True, wide=True)]

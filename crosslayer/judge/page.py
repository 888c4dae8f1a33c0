"""Tables and sentences that the pages of all comparisons have in common."""

from collections.abc import Iterable, Sequence

from crosslayer.judge.clock import TIMES
from crosslayer.judge.report import ALL, Against, Report, Row
from crosslayer.judge.rows import RETRIEVAL
from crosslayer.output.formatting import UNKNOWN, Table, listed
from crosslayer.output.page import Cell, Mark
from crosslayer.output.panel import QUIET, Dots, Line, Panel
from crosslayer.stats.differences import in_points
from crosslayer.stats.estimate import band

KINDS = {True: "pass", False: "fail", None: "skip"}  # of a verdict's cell, by whether the candidate is better
# Scopes that a sentence names at most; more are in the table.
NAMED = 6


def listing(title: str, rows: Sequence[Row], details: dict[str, str] | None = None, of: str = "scope") -> Table:
    """Return a table with a line for each row.

    `details` are those of the rows' details that have a column, with its head; `of` is the head of the scopes.
    """
    details = details or {}
    # A column in which all lines would say the same is left out, since a terminal is narrow.
    has_names = len({row.candidate for row in rows}) > 1
    has_scopes = any(row.scope != ALL for row in rows)
    has_references = {row.against for row in rows} != {Against.ORIGINAL}
    compared = any(row.change is not None for row in rows)

    head = [*(["candidate"] if has_names else []), *([of] if has_scopes else []), "quantity"]
    head += ["against"] if has_references else []
    if compared:
        head += ["compared with" if has_references else "original", "candidate"]
        head += ["change\n(95% interval)", "verdict", "interval over"]
    else:
        head.append("score")

    cells = []
    for row in rows:
        cell: list[Cell] = [row.candidate] if has_names else []
        cell += [*([row.scope] if has_scopes else []), TIMES.get(row.quantity, row.quantity)]
        cell += [str(row.against)] if has_references else []
        cell += [row.text(row.original) or UNKNOWN] if compared else []
        cell.append(row.text(row.value) or UNKNOWN)
        if row.change is not None:
            cell += [row.change_text().replace(" (", "\n("), Mark(row.verdict, KINDS[row.is_better])]
            # One unit (a cache whose bytes are counted) is no sample: how it was taken says all.
            over = row.change.how if row.change.n == 1 else f"{row.change.n} {row.change.over}, {row.change.how}"
            cell.append(UNKNOWN if row.change.interval is None else over)
        elif compared:
            cell += [UNKNOWN, UNKNOWN, UNKNOWN]
        for name in details:
            value = row.details.get(name, UNKNOWN)
            if isinstance(value, int):
                value = f"{value:,}"
            elif isinstance(value, float):
                value = f"{value:.3g}"
            cell.append(value)
        cells.append(cell)
    return title, [*head, *details.values()], cells


def grid(title: str, head: str, cells: Iterable[tuple[str, str, Cell]]) -> Table:
    """Return a table of cells, each given with its line and its column; `head` is that of the lines."""
    placed = {(line, column): cell for line, column, cell in cells}
    lines = dict.fromkeys(line for line, _ in placed)
    columns = dict.fromkeys(column for _, column in placed)
    body = []
    for line in lines:
        body.append([line, *(placed.get((line, column), UNKNOWN) for column in columns)])
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


def by_verdict(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each quantity: at which scopes the candidate is lower or higher, and where neither is seen.

    Gains and losses are worded alike.
    """
    written = []
    for quantity in dict.fromkeys(row.quantity for row in rows):
        of_quantity = [row for row in rows if row.quantity == quantity and row.change is not None]
        clauses = []
        for verdict in sorted({row.verdict for row in of_quantity}):
            group = [row for row in of_quantity if row.verdict == verdict]
            verdict = verdict[0].upper() + verdict[1:]
            if [row.scope for row in group] == [ALL]:
                clauses.append(f"{verdict}, {group[0].change_text()}")
            elif len(group) == len(of_quantity) > NAMED:
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
    lines = [f"{model.name} could not be measured: {model.failed}." for model in report.candidates if model.failed]
    for model in report.candidates:
        if "common_tokens" in model.details:
            lines.append(
                f"The vocabularies of {model.name} and the original differ in size; KL is over their "
                f"{model.details['common_tokens']:,} common tokens."
            )
    rows = [row for row in report.rows_of("bytes") if row.change is not None and row.change.value >= 1]
    larger = list(dict.fromkeys(row.candidate for row in rows))
    if larger:
        lines.append(f"Not smaller than the original's 16-bit cache: {listed(larger)}.")
    return lines


def models_table(report: Report) -> Table:
    """Return the models with what is known of each."""
    rows = []
    for model in report.models:
        facts = model.model
        about = "" if facts is None else f"{facts.class_}, {facts.parameters / 1e6:.1f} M parameters, {facts.dtype}"
        details = [
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
            for name, value in model.details.items()
        ]
        role = "original" if model is report.original else "candidate"
        rows.append([role, model.name, about, "; ".join(details)])
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
    # A figure has one axis, so differences of shares and ratios stand apart.
    differences = [row for row in compared if row.unit == "share"]
    ratios = [row for row in compared if row.change is not None and row.change.none == 1]
    panels = []
    for kind, axis, shown in (("differences", "points", differences), ("ratios", "% above", ratios)):
        if not shown:
            continue
        quantities = {quantity_name(row) for row in shown}
        # The parts of a configuration (context 512, batch 1, sdpa); those that all rows have in common say nothing.
        parts = [row.scope.split(", ") for row in shown]
        is_single = len(quantities) == 1
        common = set.intersection(*map(set, parts)) if len(shown) > 1 and is_single else set()
        names = []
        for row, of_row in zip(shown, parts, strict=True):
            first, *others = [part for part in of_row if part not in common] or [row.scope]
            more = others if is_single else [*others, quantity_name(row)]
            names.append(f"{first} ({', '.join(more)})" if more else first)

        # How far changes are from none, in percent.
        changes = [row.change for row in shown if row.change is not None]
        changes = [change.mapped(lambda value, none=change.none: 100 * (value - none)) for change in changes]
        title = min(quantities) if is_single else kind
        title = f"{title[0].upper()}{title[1:]}"
        sentence = f"Candidate − original: beyond 0 to the right the candidate is higher. Bars: {interval}."
        dots = Dots(names, *band(changes), single=[[] for _ in shown])
        panels.append(Panel(f"{key}{kind}", title, sentence, axis, "", dots=dots))
    return panels


def bytes_and_kl(record: Report) -> list[Panel]:
    """Return the figure of bytes against KL, with those candidates joined that none beats in both."""
    damage = record.changes("KL")
    points = []
    for candidate, size in record.changes("bytes").items():
        if candidate in damage:
            points.append((100 * size.value, damage[candidate], candidate))
    if not points:
        return []
    lines = [Line(name, [share], *band([kl])) for share, kl, name in points]

    # By bytes, then by KL: a point is beaten unless its KL is below that of all with fewer bytes.
    front: list[tuple[float, float]] = []
    lowest = float("inf")
    for share, kl, _ in sorted(points, key=lambda point: (point[0], point[1].value)):
        if kl.value < lowest:
            front.append((share, kl.value))
            lowest = kl.value
    if len(front) > 1:
        shares, kls = map(list, zip(*front, strict=True))
        lines.insert(0, Line("not beaten", shares, kls, dashed=True, color=QUIET))

    title, caption = "Bytes against damage", "Lower and further left is better; bars are 95% intervals over windows."
    axes = ("cache, % of the original in 16 bits", "KL, nats/token")
    # A KL of 0 (a cache that changed nothing) has no place on a logarithmic axis.
    log_y = all(kl.value > 1e-6 for _, kl, _ in points)
    return [Panel("bytes_and_kl", title, caption, *axes, lines, log_y=log_y, bars=True, wide=True)]

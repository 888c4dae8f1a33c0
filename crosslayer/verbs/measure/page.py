"""The page and the sentences of a measurement: one table, one figure, one sentence of advice for each goal."""

from crosslayer.output.formatting import UNKNOWN, listed, percent, readable_bytes
from crosslayer.output.page import Cell, Page
from crosslayer.output.panel import Line, Panel
from crosslayer.output.shown import Table
from crosslayer.stats.estimate import band
from crosslayer.verbs.measure.result import NEW, Measurement, Row

BUDGETS = (0.01, 0.05)  # KL in nats/token that advice is given for
LABELS = {
    "bytes": "bytes",
    "KL": "KL, nats/token",
    "perplexity": "perplexity ×",
    "retrieval": "numbers found",
    "step": "step ×",
}


def layout(record: Measurement) -> Page:
    """Return the page."""
    original, settings = record.original, record.settings
    return Page(
        title=f"Candidates against {original.name}",
        subtitle=(
            f"{settings.windows} windows of {settings.length} tokens · bytes and time after {settings.context:,} "
            f"· {original.dtype} on {original.device} · {record.seconds:.0f} s"
        ),
        cards=[],
        sentences=sentences(record),
        panels=panels(record),
        tables=[by_domain(record), *by_length(record), every_row(record)],
        lead=[overview(record)],
    )


def sentences(record: Measurement) -> list[str]:
    """Return advice for each goal, what the intervals are over, and which candidates failed."""
    lines = [*_advice(record)]
    lines += [f"{one.name} could not be measured: {one.failed}." for one in record.candidates if one.failed]
    larger = [row.candidate for row in _rows(record, "bytes") if row.change.value >= 1]
    if larger:
        lines.append(f"Not smaller than the original's 16-bit cache: {listed(larger)}.")
    if _rows(record, "KL"):
        lines.append(
            "KL intervals are 95% bootstrap intervals over windows: they hold for more text of these domains. For text "
            "of another kind read the prediction interval in the column “a new domain”."
        )
    return lines


def overview(record: Measurement) -> Table:
    """Return the table of all candidates: a row for each."""
    quantities = [name for name in LABELS if _rows(record, name)]
    head = ["candidate", *(LABELS[name] for name in quantities)]
    rows: list[list[Cell]] = []
    for candidate in record.candidates:
        cells: list[Cell] = [candidate.name]
        for name in quantities:
            cells.append(_cell(record.row(candidate.name, name)))
        if "KL" in quantities:
            cells += [_worst(record, candidate.name), _cell(record.row(candidate.name, "KL", NEW))]
        rows.append([*cells, candidate.failed or ", ".join(candidate.engines)])
    if "KL" in quantities:
        head += ["worst domain", NEW]
    return "Candidates", [*head, "engines (by model type, not tried)"], rows


def by_domain(record: Measurement) -> Table:
    """Return KL and perplexity by domain."""
    rows: list[list[Cell]] = []
    for row in record.rows:
        if row.quantity == "KL" and row.scope not in ("all", NEW):
            ratio = record.row(row.candidate, "perplexity", row.scope)
            rows.append([row.candidate, row.scope, row.change.text(4), _cell(ratio)])
    return "By domain", ["candidate", "domain", LABELS["KL"], LABELS["perplexity"]], rows


def by_length(record: Measurement) -> list[Table]:
    """Return retrieval by length, if numbers were hidden."""
    found = [row for row in record.rows if row.quantity == "retrieval" and row.scope != "all"]
    rows: list[list[Cell]] = [[row.candidate, f"{int(row.scope):,}", _cell(row)] for row in found]
    return [("Retrieval by length", ["candidate", "tokens", LABELS["retrieval"]], rows)] if rows else []


def every_row(record: Measurement) -> Table:
    """Return all rows, as `frame` has them."""
    rows: list[list[Cell]] = []
    for row in record.rows:
        change, verdict = row.change.text(4, signed=row.quantity == "retrieval"), row.change.verdict
        over = f"{row.change.n} {row.change.over}, {row.change.how}"
        rows.append(
            [row.candidate, row.quantity, row.scope, _number(row.original), _number(row.value), change, verdict, over]
        )
    head = ["candidate", "quantity", "scope", "original", "candidate's", "change (95%)", "verdict", "interval over"]
    return "All rows", head, rows


def panels(record: Measurement) -> list[Panel]:
    """Return the figure of bytes against KL, with those candidates joined that none beats in both."""
    points = []
    for candidate in record.candidates:
        size, kl = record.row(candidate.name, "bytes"), record.row(candidate.name, "KL")
        if size is not None and kl is not None:
            points.append((100 * size.change.value, kl.change, candidate.name))
    if not points:
        return []
    lines = [Line(name, [x], *band([kl])) for x, kl, name in points]
    front, best = [], float("inf")
    for x, kl, _ in sorted(points, key=lambda point: (point[0], point[1].value)):
        if kl.value < best:
            front.append((x, kl.value))
            best = kl.value
    if len(front) > 1:
        lines.append(Line("not beaten", [x for x, _ in front], [y for _, y in front], dashed=True, color="#697082"))
    return [
        Panel(
            "bytes_and_kl",
            "Bytes against damage",
            "Lower and further left is better; bars are 95% intervals over windows.",
            "bytes of the cache, % of the original's in 16 bits",
            "KL, nats/token",
            lines,
            log_y=all((kl.low or kl.value) > 0 for _, kl, _ in points),
            bars=True,
            wide=True,
        )
    ]


def _advice(record: Measurement) -> list[str]:
    lines = []
    sizes, damage = _rows(record, "bytes"), {row.candidate: row.value for row in _rows(record, "KL")}
    for budget in BUDGETS:
        within = [row for row in sizes if (damage.get(row.candidate) or 0.0) <= budget and row.candidate in damage]
        smaller = [row for row in within if row.change.value < 1]
        if smaller:
            least = min(smaller, key=lambda row: row.change.value)
            share = percent(least.change.value, 1)
            lines.append(f"Fewest bytes at a KL of at most {budget:g}: {least.candidate}, {share} of the cache.")
        elif sizes and damage:
            lines.append(f"No candidate is smaller than the original at a KL of at most {budget:g}.")
    faster = [row for row in _rows(record, "step") if row.change.is_better("lower")]
    if faster:
        fastest = min(faster, key=lambda row: row.change.value)
        lines.append(f"Fastest decoding step: {fastest.candidate}, {fastest.change.text(2)} of the original's time.")
    elif _rows(record, "step"):
        lines.append("No candidate decodes faster than the original here.")
    return lines


def _rows(record: Measurement, quantity: str) -> list[Row]:
    return [row for row in record.rows if row.quantity == quantity and row.scope == "all"]


def _worst(record: Measurement, candidate: str) -> str:
    """Return the domain with the largest KL, and that KL."""
    rows = [row for row in record.rows if row.candidate == candidate and row.quantity == "KL"]
    domains = [row for row in rows if row.scope not in ("all", NEW)]
    if not domains:
        return UNKNOWN
    worst = max(domains, key=lambda row: row.change.value)
    return f"{worst.scope} {worst.change.text(4)}"


def _cell(row: Row | None) -> str:
    """Return what the overview shows of a row."""
    if row is None:
        return UNKNOWN
    if row.quantity == "bytes":
        return f"{percent(row.change.value, 1)} ({readable_bytes(row.value or 0)})"
    if row.quantity == "retrieval":
        count = row.change.n
        ours, theirs = round((row.value or 0) * count), round((row.original or 0) * count)
        return f"{ours} of {count} (original {theirs})"
    return row.change.text(2 if row.quantity == "step" else 3 if row.quantity == "perplexity" else 4)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"

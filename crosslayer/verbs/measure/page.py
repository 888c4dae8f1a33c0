"""The page and the sentences of a measurement: one table, one figure, one sentence of advice for each goal."""

from crosslayer.judge.page import bytes_and_kl, failures, listing
from crosslayer.judge.report import Row
from crosslayer.judge.rows import NEW
from crosslayer.output.formatting import UNKNOWN, Table, listed, percent
from crosslayer.output.page import Cell, Page
from crosslayer.output.panel import Line, Panel
from crosslayer.verbs.measure.exact_layers import FEW, PRICE, flags, prices
from crosslayer.verbs.measure.result import BITS, Measurement

BUDGETS = (0.01, 0.05)  # KL in nats/token that advice is given for
NOTHING = 1e-6  # KL below which no prediction has changed
HEADS = {
    "bytes": "KV cache",
    "KL": "KL, nats/token",
    "perplexity": "perplexity",
    "retrieval": "numbers found",
    "ttft": "first token",
    "tpot_dynamic": "decoding step",
}


def layout(record: Measurement) -> Page:
    """Return the page."""
    original, settings = record.original, record.settings
    assert original is not None and original.model is not None
    scoped = [row for row in record.rows if row.scope != "all"]
    return Page(
        title=f"Candidates against {original.name}",
        subtitle=(
            f"{settings.windows} windows of {settings.length} tokens · bytes and time after {settings.context:,} · "
            f"{original.model.dtype} on {original.model.device} · {record.seconds:.0f} s"
        ),
        cards=[],
        sentences=sentences(record),
        panels=[*bytes_and_kl(record), *_by_layer(record)],
        tables=[
            listing("All candidates", [row for row in record.rows if row.scope == "all"]),
            *([listing("By domain, length and task", scoped)] if scoped else []),
        ],
        lead=[overview(record)],
    )


def sentences(record: Measurement) -> list[str]:
    """Return advice for each goal, what the intervals are over, and which candidates failed."""
    lines = [*_advice(record), *_flags(record), *failures(record)]
    if record.changes("KL"):
        lines.append(
            "KL intervals are 95% bootstrap intervals over windows, conditional on these texts. For text "
            f"of another kind, use the prediction interval in the column “{NEW}”."
        )
    return lines


def overview(record: Measurement) -> Table:
    """Return the table of all candidates: a row for each."""
    quantities = [name for name in HEADS if record.changes(name)]
    tasks = list(dict.fromkeys(row.scope for row in record.rows if "items" in row.details))
    head = ["candidate", *(HEADS[name] for name in quantities), *tasks]
    rows: list[list[Cell]] = []
    for candidate in record.candidates:
        cells: list[Cell] = [candidate.name]
        cells += [_cell(record.row(candidate.name, name)) for name in quantities]
        own = {row.scope: row for row in reversed(record.rows) if row.candidate == candidate.name}
        cells += [_cell(own.get(task)) for task in tasks]
        if "KL" in quantities:
            cells += [_worst(record, candidate.name), _cell(record.row(candidate.name, "KL", NEW))]
        rows.append([*cells, candidate.failed or ", ".join(candidate.engines)])
    if "KL" in quantities:
        head += ["worst domain", NEW]
    return "Candidates", [*head, "engines (by model type, untested)"], rows


def least(record: Measurement, budget: float = BUDGETS[-1]) -> str | None:
    """Return the candidate with the fewest bytes within a KL; bits that change nothing were not seen at work."""
    sizes, damage = record.changes("bytes"), record.changes("KL")
    within = [name for name in sizes if name in damage and damage[name].value <= budget and sizes[name].value < 1]
    return min(set(within) - {*_unseen(record)}, key=lambda name: (sizes[name].value, name), default=None)


def _unseen(record: Measurement) -> list[str]:
    return [name for name, kl in record.changes("KL").items() if BITS.match(name) and abs(kl.value) < NOTHING]


def _advice(record: Measurement) -> list[str]:
    lines = []
    sizes, damage, steps = (record.changes(name) for name in ("bytes", "KL", "tpot_dynamic"))
    found: dict[str | None, float] = {}
    for budget in BUDGETS if sizes and damage else ():
        name = least(record, budget)
        found[name] = found.get(name, budget) if name else budget
    for name, budget in found.items():
        line = f"No candidate is smaller than the original at a KL of at most {budget:g} nats/token."
        if name is not None:
            share = percent(sizes[name].value, 1)
            line = f"Fewest bytes at a KL of at most {budget:g} nats/token: {name}, {share} of the 16-bit cache."
        lines.append(line)
    if unseen := _unseen(record):
        lines.append(
            f"{listed(unseen)} changed nothing in windows of {record.settings.length} tokens, since the newest tokens "
            "are kept as they are; measure with a larger --length."
        )
    faster = [name for name, change in steps.items() if change.is_better("lower")]
    if faster:
        fastest = min(faster, key=lambda name: steps[name].value)
        lines.append(f"Fastest decoding step: {fastest}, {steps[fastest].text(2)} of the original's time.")
    elif steps:
        lines.append("No candidate decodes faster than the original here.")
    return lines


def _prices(record: Measurement) -> dict[str, dict[int, float]]:
    """Return what quantizing each layer alone costs, by candidate."""
    return {kind: prices(record.rows, kind) for kind in dict.fromkeys(row.candidate for row in record.rows_of(PRICE))}


def _flags(record: Measurement) -> list[str]:
    """Return the options with which engines leave the most expensive layers exact."""
    count, lines = record.settings.exact_layers, []
    for kind, costs in _prices(record).items():
        options = flags(costs, kind, count)
        lines += [f"{kind} with {count} layers exact in {options}."] if options else []
    return lines


def _by_layer(record: Measurement) -> list[Panel]:
    """Return the figure of what quantizing each layer alone costs."""
    lines = [Line(kind, list(map(float, own)), list(own.values())) for kind, own in _prices(record).items()]
    sentence = f"KL on {FEW} windows or fewer; KLs of single layers need not add up."
    panel = Panel("by_layer", "Quantizing one layer alone", sentence, "layer", "KL, nats/token", lines, log_y=True)
    return [panel] if lines else []


def _worst(record: Measurement, candidate: str) -> str:
    """Return the domain with the largest KL, and that KL."""
    rows = [row for row in record.rows_of("KL") if row.candidate == candidate and row.scope not in ("all", NEW)]
    if not rows:
        return UNKNOWN
    worst = max(rows, key=lambda row: row.value or 0.0)
    return f"{worst.scope} {worst.change_text()}"


def _cell(row: Row | None) -> str:
    """Return what the overview shows of a row."""
    if row is None or row.change is None:
        return UNKNOWN
    if row.unit == "bytes":
        return f"{row.change_text()} ({row.text(row.value)})"
    if row.quantity == "retrieval":
        count = row.change.n
        return f"{round((row.value or 0) * count)} of {count} (original {round((row.original or 0) * count)})"
    if row.unit == "share":
        return f"{row.text(row.value)}: {row.change_text()} points"
    return row.change_text()

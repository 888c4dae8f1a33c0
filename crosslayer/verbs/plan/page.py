"""The page of a plan, from its record alone: who reads whom, bytes by layer, bytes by length."""

from crosslayer.output.formatting import percent, readable_bytes
from crosslayer.output.page import Cell, Page, Table
from crosslayer.output.panel import COLORS, QUIET, Line, Panel
from crosslayer.output.wires import Wires
from crosslayer.verbs.plan.result import PlannedLength, PlanReport

MIB = 2**20


def layout(record: PlanReport) -> Page:
    """Return the page."""
    settings, last = record.settings, max(record.sizes, key=lambda size: size.length)
    sequences = "one sequence" if settings.batch == 1 else f"{settings.batch} sequences"
    cards = [
        ("KV cache", readable_bytes(last.stored_bytes), f"at {last.length:,} tokens, {sequences}, {settings.kv_dtype}"),
        ("of a full cache", share(last), f"all layers, all tokens: {readable_bytes(last.full_bytes)}"),
        ("read for the last token", readable_bytes(last.read_bytes), "a layer that reads another's states counts too"),
    ]
    return Page(
        title=f"KV cache of {record.model}",
        subtitle=f"{record.type} · {len(record.layers)} layers · as {settings.engine} allocates it, from the config",
        cards=cards,
        sentences=record.findings,
        panels=[_wires(record), _curve(record)],
        tables=[_methods(record)] if record.methods else [],
        lead=[_lengths(record)],
    )


def sentences(record: PlanReport) -> list[str]:
    """Return the findings in sentences."""
    return list(record.findings)


def share(size: PlannedLength) -> str:
    """Return the share of a full cache."""
    return percent(size.stored_bytes / size.full_bytes, 1) if size.full_bytes else "–"


def _lengths(record: PlanReport) -> Table:
    rows: list[list[Cell]] = []
    for size in record.sizes:
        sizes = [readable_bytes(number) for number in (size.stored_bytes, size.full_bytes, size.read_bytes)]
        rows.append([f"{size.length:,}", sizes[0], share(size), *sizes[1:]])
    head = ["tokens", "stored", "of a full cache", "a full cache", "read for the last token"]
    return "By length", head, rows


def _methods(record: PlanReport) -> Table:
    rows: list[list[Cell]] = []
    for method in record.methods:
        stored, plain = method.stored_bytes[-1], record.curve[-1].stored_bytes
        rows.append([method.method, readable_bytes(stored), percent(stored / plain, 1), method.pretrained])
    title = f"With sharing across layers, at {record.curve[-1].length:,} tokens"
    return title, ["method", "stored", "of this cache", "in a pretrained model"], rows


def _wires(record: PlanReport) -> Panel:
    longest = max(record.settings.length)
    readers = sum(bool(layer.sources) for layer in record.layers)
    sharing = f"{readers} of {len(record.layers)} read another layer's (arrows)" if readers else "none reads another's"
    return Panel(
        key="layers",
        title="Layers: what each stores, and whose states it reads",
        sentence=f"What each layer stores at {longest:,} tokens; {sharing}.",
        x_title="MiB",
        y_title="layer",
        wires=Wires(
            widths=[layer.stored_bytes / MIB for layer in record.layers],
            kinds=[layer.mask for layer in record.layers],
            sources=[layer.sources for layer in record.layers],
        ),
    )


def _curve(record: PlanReport) -> Panel:
    x = [size.length for size in record.curve]
    lines = [Line("this model", x, [size.stored_bytes / MIB for size in record.curve], color=COLORS[0])]
    if record.curve[-1].full_bytes:
        full = [size.full_bytes / MIB for size in record.curve]
        lines.append(Line("all layers, all tokens", x, full, color=QUIET, dashed=True))
    for number, method in enumerate(record.methods, 1):
        y = [stored / MIB for stored in method.stored_bytes]
        lines.append(Line(f"with {method.method}", x, y, color=COLORS[number % len(COLORS)]))
    return Panel(
        key="lengths",
        title="Bytes over length",
        sentence=f"What {record.settings.engine} allocates, beside a cache of all layers' own keys and values.",
        x_title="tokens",
        y_title="MiB",
        lines=lines,
        log_x=True,
        log_y=True,
        x_ticks={length: f"{length // 1024}k" if length >= 1024 else str(length) for length in x},
    )

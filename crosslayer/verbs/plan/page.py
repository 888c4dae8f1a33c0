"""The page of a plan, from its record alone: who reads whom, bytes by layer, bytes by length."""

from crosslayer.output.formatting import UNKNOWN, percent, readable_bytes
from crosslayer.output.page import Cell, Page, Table
from crosslayer.output.panel import QUIET, Line, Panel, Wires
from crosslayer.verbs.plan.result import PlannedLength, PlanReport
from crosslayer.wiring.result import COLUMNS, SHARE

MIB = 2**20
FULL = "the 16-bit cache"


def layout(record: PlanReport) -> Page:
    """Return the page."""
    settings, last = record.settings, max(record.sizes, key=lambda size: size.length)
    sequences = "one sequence" if settings.batch == 1 else f"{settings.batch} sequences"
    stored, share, read = _cells(last)
    cards = [
        ("KV cache", stored, f"at {last.length:,} tokens, {sequences}, {settings.kv_dtype}"),
        (SHARE, share, f"all layers, all tokens, in 16 bits: {readable_bytes(last.full_bytes)}"),
        ("read per decoding step", read, "a layer that reads another's states counts too"),
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


def _lengths(record: PlanReport) -> Table:
    rows: list[list[Cell]] = [[f"{size.length:,}", *_cells(size)] for size in record.sizes]
    return "By length", ["tokens", *COLUMNS], rows


def _methods(record: PlanReport) -> Table:
    rows: list[list[Cell]] = []
    for method in record.methods:
        cells = _cells(max(method.sizes, key=lambda size: size.length)) if method.sizes else [UNKNOWN] * 3
        rows.append([method.method, *cells, method.pretrained])
    title = f"With sharing across layers, at {max(record.settings.length):,} tokens"
    return title, ["method", *COLUMNS, "in a pretrained model"], rows


def _cells(size: PlannedLength) -> list[str]:
    """Return the cells of `COLUMNS`."""
    share = percent(size.stored_bytes / size.full_bytes, 1) if size.full_bytes else UNKNOWN
    return [readable_bytes(size.stored_bytes), share, readable_bytes(size.read_bytes)]


def _wires(record: PlanReport) -> Panel:
    longest = max(record.settings.length)
    readers = sum(bool(layer.sources) for layer in record.layers)
    sharing = f"{readers} of {len(record.layers)} read another layer's (arrows)" if readers else "none reads another's"
    title = "Layers: what each stores, and whose states it reads"
    sentence = f"What each layer stores at {longest:,} tokens; {sharing}."
    wires = Wires(
        widths=[layer.stored_bytes / MIB for layer in record.layers],
        kinds=[layer.mask for layer in record.layers],
        sources=[layer.sources for layer in record.layers],
    )
    return Panel("layers", title, sentence, "MiB", "layer", wires=wires)


def _curve(record: PlanReport) -> Panel:
    x = [size.length for size in record.curve]
    curves = [("this model", [size.stored_bytes for size in record.curve])]
    curves += [(f"with {one.method}", [size.stored_bytes for size in one.curve]) for one in record.methods]
    curves.append((FULL, [size.full_bytes for size in record.curve]))
    names: dict[tuple[int, ...], list[str]] = {}  # a line is of all that are as large
    for name, sizes in curves:
        names.setdefault((*sizes,), []).append(name)
    lines = []
    for sizes, named in names.items():
        look = {"color": QUIET, "dashed": True} if named == [FULL] else {}
        lines += [Line(", ".join(named), x, [size / MIB for size in sizes], **look)] if any(sizes) else []
    sentence = f"What {record.settings.engine} allocates, and the 16-bit cache of all layers and tokens."
    ticks = {length: f"{length // 1024}k" if length >= 1024 else str(length) for length in x}
    scale = {"log_x": True, "log_y": True, "x_ticks": ticks}
    return Panel("lengths", "Bytes over length", sentence, "tokens", "MiB", lines, **scale)

"""The page and the sentences of a codec: bytes against damage, damage by domain, times."""

from crosslayer.judge.page import bytes_and_kl, listing
from crosslayer.judge.report import Row
from crosslayer.output.formatting import UNKNOWN, Table, listed, readable_bytes
from crosslayer.output.page import Cell, Page
from crosslayer.verbs.fit_codec.result import CodecReport


def layout(record: CodecReport) -> Page:
    """Return the page."""
    settings, original = record.settings, record.original
    assert original is not None and original.model is not None
    times = [row for row in record.rows if row.unit == "s"]
    return Page(
        title=f"A codec for the caches of {original.name}",
        subtitle=(
            f"{settings.windows} windows: a prompt of {settings.prompt} tokens, KL over the next {settings.continued} "
            f"· {original.model.dtype} on {original.model.device} · fitted in {record.fitting:.0f} s"
        ),
        cards=[
            ("bytes of the 16-bit cache", record.rows_of("bytes")[0].change_text(), "everything counted"),
            ("KL, nats/token", record.rows_of("KL")[0].change_text(), "95% over windows"),
            *((row.quantity, row.change_text(), f"of a prefill of {row.text(row.original)}") for row in times),
        ],
        sentences=sentences(record),
        panels=bytes_and_kl(record),
        tables=[listing("Times (original: prefill)", times)],
        lead=tables(record),
    )


def sentences(record: CodecReport) -> list[str]:
    """Return what storing a prompt costs, in bytes, damage and time."""
    share, cost = record.changes("bytes")["codec"], record.rows_of("KL")[0].change_text()
    decoding, encoding = (record.changes(quantity)["codec"].text(3) for quantity in ("decoding", "encoding"))
    size = record.bytes_per_token
    return [
        f"A stored prompt takes {share.value:.1%} of the 16-bit cache: {share.value * size:,.0f} of {size:,} bytes per "
        f"token, all overhead included. The KL is {cost} nats/token.",
        *([retrieved(found)] if (found := record.row("codec", "retrieval")) else []),
        f"Decoding takes {decoding} of prefill, encoding {encoding} ({record.settings.prompt} tokens).",
        f"The codec was fitted to {listed(record.fitted_to)}. Only its step size was set on other windows of the "
        "domains used for measuring.",
        f"It has {record.parameters / 1e6:.1f} million parameters, {readable_bytes(2 * record.parameters)} in 16 bits.",
    ]


def retrieved(row: Row) -> str:
    """Return how many hidden numbers the model finds on a stored text."""
    stored, own = counted(row)
    return f"With the stored cache, the model finds {stored} hidden numbers; with its own cache, {own}."


def counted(row: Row) -> list[str]:
    """Return the hidden numbers found on stored texts, and on the model's own cache: 38 of 40."""
    assert row.value is not None and row.original is not None and row.change is not None
    return [f"{round(share * row.change.n)} of {row.change.n}" for share in (row.value, row.original)]


def tables(record: CodecReport) -> list[Table]:
    """Return the table of all ways to store a cache: bytes, hidden numbers, and KL on all windows and by domain."""
    scopes = list(dict.fromkeys(row.scope for row in record.rows_of("KL")))
    sizes, rows = record.changes("bytes"), []
    numbers = {row.candidate: counted(row)[0] for row in record.rows_of("retrieval")}
    for candidate in record.candidates:
        cells: list[Cell] = [candidate.name, f"{sizes[candidate.name].value:.1%}"]
        cells += [numbers[candidate.name]] if numbers else []
        for scope in scopes:
            row = record.row(candidate.name, "KL", scope)
            cells.append(UNKNOWN if row is None else row.change_text())
        rows.append(cells)
    head = ["stored as", "bytes", *(["numbers found"] if numbers else []), *scopes]
    scores = [row for row in record.rows if "items" in row.details]
    tasks = [listing("Tasks on stored contexts", scores, {"items": "items"}, "task")] if scores else []
    return [("KL of stored caches, nats/token (95% over windows)", head, rows), *tasks]

"""The page and the sentences of a codec: bytes against damage, damage by domain, times."""

from crosslayer.output.formatting import UNKNOWN, listed, percent, readable_bytes, readable_seconds
from crosslayer.output.page import Cell, Page
from crosslayer.output.panel import Line, Panel
from crosslayer.output.shown import Table
from crosslayer.verbs.fit_codec.result import CodecReport


def layout(record: CodecReport) -> Page:
    """Return the page."""
    settings, times = record.settings, record.times
    return Page(
        title=f"A codec for the caches of {record.model.name}",
        subtitle=(
            f"{settings.windows} windows: a prompt of {settings.prompt} tokens, KL over the next {settings.continued} "
            f"· {record.model.dtype} on {record.model.device} · fitted in {record.fitting:.0f} s"
        ),
        cards=[
            (name, ratio.text(3), f"of a prefill of {readable_seconds(times.prefill)}")
            for name, ratio in (("Encoding", times.encode_ratio), ("Decoding", times.decode_ratio))
        ],
        sentences=sentences(record),
        panels=panels(record),
        tables=[],
        lead=tables(record),
    )


def sentences(record: CodecReport) -> list[str]:
    """Return what storing a prompt costs, in bytes, damage and time."""
    row, times, settings = record.row("codec"), record.times, record.settings
    assert row is not None, "checked on construction"
    size = record.bytes_per_token
    prefill = readable_seconds(times.prefill)
    return [
        f"A stored prompt takes {percent(row.share, 1)} of the 16-bit cache: {row.share * size:,.0f} of {size:,} bytes "
        f"a token, everything counted. It costs {row.kl.text(4)} nats/token.",
        f"Decoding takes {times.decode_ratio.text(3)} of prefill, encoding {times.encode_ratio.text(3)} "
        f"({settings.prompt} tokens, {prefill} of prefill).",
        f"The codec was fitted to {listed(record.fitted_to)}. Of the domains that it is measured on, other windows set "
        "its step, and nothing else.",
        f"It has {record.parameters / 1e6:.1f} million numbers, {readable_bytes(2 * record.parameters)} in 16 bits.",
    ]


def tables(record: CodecReport) -> list[Table]:
    """Return the table of all ways to store a cache: bytes, and KL on all windows and by domain."""
    scopes = list(dict.fromkeys(row.scope for row in record.rows))
    rows: list[list[Cell]] = []
    for way in dict.fromkeys(row.way for row in record.rows):
        own = [record.row(way, scope) for scope in scopes]
        share = UNKNOWN if own[0] is None else percent(own[0].share, 1)
        rows.append([way, share, *(UNKNOWN if row is None else row.kl.text(4) for row in own)])
    return [("KL of stored caches, nats/token (95% over windows)", ["stored as", "bytes", *scopes], rows)]


def panels(record: CodecReport) -> list[Panel]:
    """Return the figure of bytes against damage."""
    groups: dict[str, list] = {}
    for row in record.rows:
        if row.scope == "all":
            groups.setdefault(row.way.partition(" ")[0], []).append(row)
    lines = []
    for name, rows in groups.items():
        rows.sort(key=lambda row: row.share)
        value, low, high = ([getattr(row.kl, end) for row in rows] for end in ("value", "low", "high"))
        lines.append(Line(name, [100 * row.share for row in rows], value, low, high))
    return [
        Panel(
            "bytes_and_kl",
            "Bytes against damage",
            "Lower and further left is better; bars are 95% intervals over windows.",
            "bytes of a stored prompt, % of the 16-bit cache",
            "KL, nats/token",
            lines,
            log_y=all((low or 0) > 0 for line in lines for low in line.low or [0]),
            bars=True,
            wide=True,
        )
    ]

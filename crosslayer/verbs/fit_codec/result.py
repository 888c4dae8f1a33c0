"""A codec and its costs, with their page: bytes against damage, damage by domain, times relative to prefill."""

from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr

from crosslayer.codec.codec import Codec
from crosslayer.judge.page import bytes_and_kl, found, grid, listing, quantity_name
from crosslayer.judge.report import ALL, Report
from crosslayer.judge.rows import RETRIEVAL
from crosslayer.output.formatting import Table, listed, readable_bytes
from crosslayer.output.page import Page
from crosslayer.output.record import Options, Seed


class CodecSettings(Options):
    """The options."""

    share: float | None = Field(gt=0, lt=1)
    kl: float | None = Field(gt=0)
    calibration: int | None = Field(ge=3)
    length: int = Field(ge=32)
    windows: int = Field(ge=2)
    prompt: int = Field(ge=16)
    continued: int = Field(ge=2)
    numbers: int = Field(ge=0, multiple_of=5)
    tasks: tuple[str, ...] = ()
    limit: int | None = Field(default=None, ge=1)
    repeats: int = Field(ge=1)
    seed: Seed
    bos: str


class BreakEven(NamedTuple):
    """Bandwidths, in bytes per second, between which a stored prompt is the fastest way to a cache.

    It arrives after C / w + D seconds at a bandwidth w, for C bytes and a decoding of D seconds. A prefill takes P
    seconds, a 16-bit cache of B bytes B / w, an FP8 cache half of that. None: at no bandwidth.
    """

    prefill: float | None  # C / (P − D): loading beats prefill above it
    wide: float | None  # (B − C) / D: it beats loading the 16-bit cache below it
    fp8: float | None  # (B / 2 − C) / D: and the FP8 cache


class CodecReport(Report):
    """What `crosslayer.fit_codec` returns; `codec` is there until the report is loaded from a folder.

    Candidates are ways to store a cache: the codec, the codec with fewer bytes, quantized caches. A row of bytes is of
    a stored prompt, everything counted; rows of encoding and decoding have the time of prefill as the original's.
    """

    schema_: Literal["crosslayer/fit_codec/3"] = Field(default="crosslayer/fit_codec/3", alias="schema")
    settings: CodecSettings
    fitted_to: tuple[str, ...]
    parameters: int = Field(description="numbers of the codec's matrices")
    bytes_per_token: int = Field(description="of the 16-bit cache")
    fitting: float = Field(description="seconds until the codec was ready")
    _codec: Codec | None = PrivateAttr(default=None)

    def holding(self, codec: Codec) -> Self:
        """Return this report, which then has the codec and saves it."""
        self._codec = codec
        return self

    @property
    def codec(self) -> Codec:
        """The codec."""
        if self._codec is None:
            raise ValueError("a report that was loaded has no codec; use load_codec with its folder")
        return self._codec

    def break_even(self) -> BreakEven:
        """Return when storing pays, from the measured times of one prompt and from its bytes."""
        wide = float(self.bytes_per_token * self.settings.prompt)
        stored = wide * self.changes("bytes")["codec"].value
        row = self.row("codec", "decoding")
        assert row is not None and row.value is not None and row.original is not None
        gained = row.original - row.value
        return BreakEven(
            prefill=stored / gained if gained > 0 else None,
            wide=(wide - stored) / row.value if stored < wide else None,
            fp8=(wide / 2 - stored) / row.value if stored < wide / 2 else None,
        )

    def layout(self) -> Page:
        """Return the page."""
        settings, original = self.settings, self.original
        assert original is not None
        times = [row for row in self.rows if row.unit == "s"]
        return Page(
            title=f"A codec for the caches of {original.name}",
            subtitle=(
                f"{settings.windows} windows: a prompt of {settings.prompt} tokens, KL over the next "
                f"{settings.continued} · {original.place} · fitted in {self.fitting:.0f} s"
            ),
            cards=[
                ("bytes of the 16-bit cache", self.rows_of("bytes")[0].change_text(), "everything counted"),
                ("KL, nats/token", self.rows_of("KL")[0].change_text(), "95% over windows"),
                *((row.quantity, row.change_text(), f"of a prefill of {row.text(row.original)}") for row in times),
            ],
            panels=bytes_and_kl(self),
            tables=[listing("Times (original: prefill)", times)],
        )

    def sentences(self) -> list[str]:
        """Return what storing a prompt costs, in bytes, damage and time."""
        share = self.changes("bytes")["codec"]
        cost = self.rows_of("KL")[0].change_text()
        size = self.bytes_per_token
        lines = [
            f"A stored prompt takes {share.value:.1%} of the 16-bit cache: {share.value * size:,.0f} of {size:,} bytes "
            f"per token, all overhead included; {2 * share.value:.1%} of an FP8 cache. The KL is {cost} nats/token."
        ]
        numbers = self.row("codec", RETRIEVAL)
        if numbers is not None:
            stored, exact = numbers.count(numbers.value), numbers.count(numbers.original)
            lines.append(
                f"With the stored cache, the model finds {stored} hidden numbers; with its own cache, {exact}."
            )

        decoding, encoding = (self.changes(quantity)["codec"].text(3) for quantity in ("decoding", "encoding"))
        sides = {"prefill": "above", "loading the 16-bit cache": "below", "loading an FP8 cache": "below"}
        ways = []
        for (way, side), rate in zip(sides.items(), self.break_even(), strict=True):
            when = "at no bandwidth" if rate is None else f"{side} {readable_bytes(int(rate))}/s"
            ways.append(f"{way} {when}")
        return [
            *lines,
            f"Decoding takes {decoding} of prefill, encoding {encoding} ({self.settings.prompt} tokens).",
            f"By these times, loading a stored prompt beats {'; '.join(ways)}.",
            f"The codec was fitted to {listed(self.fitted_to)}. Only its step size was set on other windows of the "
            "domains used for measuring.",
            f"It has {self.parameters / 1e6:.1f} million parameters, {readable_bytes(2 * self.parameters)} in 16 bits.",
        ]

    def tables(self) -> list[Table]:
        """Return the table of all ways to store a cache: bytes, hidden numbers, and KL on all windows and by domain."""
        whole = [row for row in self.rows if row.scope == ALL and row.unit != "s"]
        cells = [(row.candidate, quantity_name(row), found(row)) for row in whole]
        tables = [grid("Stored caches (95% over windows)", "stored as", cells)]
        domains = [row for row in self.rows_of("KL") if row.scope != ALL]
        if domains:
            cells = [(row.candidate, row.scope, row.change_text()) for row in domains]
            tables.append(grid("KL by domain, nats/token", "stored as", cells))
        scores = [row for row in self.rows if "items" in row.details]
        tasks = [listing("Tasks on stored contexts", scores, {"items": "items"}, "task")] if scores else []
        return [*tables, *tasks]

    def write_files(self, folder: Path) -> None:
        """Also write the codec."""
        super().write_files(folder)
        if self._codec is not None:
            self._codec.save(folder)

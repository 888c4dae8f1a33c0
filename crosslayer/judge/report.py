"""What every comparison returns: a row for each quantity of each candidate."""

import math
from enum import StrEnum
from typing import Any

from pydantic import Field

from crosslayer.output.formatting import percent, readable_bytes, readable_seconds
from crosslayer.output.record import Frozen, ModelFacts, columns
from crosslayer.output.result import Result
from crosslayer.stats.differences import in_points
from crosslayer.stats.estimate import NOT_TESTED, Better, Estimate
from crosslayer.stats.times import SPEED

Detail = float | int | str
ALL = "all"  # the scope of what is measured on all windows, items or numbers together


class Against(StrEnum):
    """What a candidate is compared with in a row."""

    ORIGINAL = "the original"
    BEFORE = "the state before"
    UNFITTED = "without the fit"
    TRAINED = "the trained original"
    FIRST = "the first"  # of several caches or variants
    ABOVE = "the one above"  # in a ranking
    SEARCHED = "the searched one"


class Row(Frozen):
    """One quantity of a candidate, with that of what it is compared with: the original, unless `against` differs."""

    quantity: str
    unit: str = Field(description="nats/token, bytes, s, share (of items or numbers), or empty")
    candidate: str
    scope: str = Field(default=ALL, description="all, or a domain, a task, a length, a configuration")
    against: Against = Field(default=Against.ORIGINAL, description="what `original` and `change` refer to")
    original: float | None = None
    value: float | None = None
    change: Estimate | None = Field(default=None, description="candidate less original, or over it if `none` is 1")
    better: Better = "lower"
    details: dict[str, Detail] = Field(default={}, description="what goes with it: counts of items, bytes as stored")

    @property
    def is_better(self) -> bool | None:
        """Whether the candidate is better than the original; None if no difference is seen or there is no original."""
        return None if self.change is None else self.change.is_better(self.better)

    @property
    def verdict(self) -> str:
        """Whether the candidate's value is lower or higher; of times, whether it is faster or slower."""
        verdict = NOT_TESTED if self.change is None or self.change.verdict is None else self.change.verdict
        return SPEED.get(verdict, verdict) if self.unit == "s" else verdict  # type: ignore[call-overload]

    def change_text(self) -> str:
        """Return the change with its interval: shares in points, bytes in percent of the original's, times as 0.85x."""
        if self.change is None:
            return self.text(self.value)
        if self.unit == "bytes":
            is_exact = self.change.interval == (self.change.value, self.change.value)
            return percent(self.change.value, 1) if is_exact else self.change.text(1, percent=True)
        # The change is the share itself where the original's is 0 by definition, as of changed tokens.
        if self.unit == "share" and not self.original and self.change.p is None:
            return self.change.text(0 if self.original is None else 2, percent=True)
        if self.unit == "share":
            # Without p a reader would take the interval, which excludes 0, for the verdict.
            p = f"; p = {self.change.p:.2g}" if self.change.p_decides else ""
            return in_points(self.change).text(1, signed=True) + p
        if self.change.none == 1:
            return self.change.text(3, unit="x")
        # Two digits that are not 0: the KL of 8 bits is 0.00012.
        size = abs(self.change.value)
        digits = 4 if size >= 1e-3 or size < 1e-7 else 1 - math.floor(math.log10(size))
        return self.change.text(digits, signed=bool(self.original))

    @property
    def hits(self) -> int:
        """How many of the items, or hidden numbers, a share counts."""
        assert self.value is not None and self.change is not None
        return round(self.value * self.change.n)

    def count(self, share: float | None) -> str:
        """Return a share of the hidden numbers as a count: 38 of 40."""
        assert share is not None and self.change is not None
        return f"{round(share * self.change.n)} of {self.change.n}"

    def text(self, value: float | None) -> str:
        """Return a value of this quantity: 7.50 MiB, 52.3 ms, 41.25%."""
        if value is None:
            return ""
        if self.unit == "bytes":
            return readable_bytes(value)
        if self.unit == "s":
            return readable_seconds(value)
        return percent(value, 2) if self.unit == "share" else f"{value:.4g}"


class JudgedModel(Frozen):
    """A model that was measured, with the way it keeps its cache."""

    name: str
    model: ModelFacts | None = Field(default=None, description="None if it could not be loaded")
    engines: tuple[str, ...] = Field(default=(), description="engines that can serve it")
    failed: str | None = Field(default=None, description="why it could not be measured")
    details: dict[str, Detail] = Field(default={}, description="bytes of its parameters, requests that it answered …")

    @property
    def place(self) -> str:
        """How it ran, of a model that could be loaded: float32 on cpu."""
        assert self.model is not None
        return f"{self.model.dtype} on {self.model.device}"


class Measured(Result):
    """A result that holds rows."""

    rows: tuple[Row, ...]

    def row(self, candidate: str, quantity: str, scope: str = ALL, against: Against = Against.ORIGINAL) -> Row | None:
        """Return the row of a quantity; None if it was not measured."""
        rows = self.rows_of(quantity, against, candidate)
        return next((row for row in rows if row.scope == scope), None)

    def rows_of(self, quantity: str, against: Against = Against.ORIGINAL, candidate: str | None = None) -> list[Row]:
        """Return the rows of a quantity, of all candidates or of one."""
        rows = [row for row in self.rows if row.quantity == quantity and row.against == against]
        return [row for row in rows if candidate in (None, row.candidate)]

    def changes(self, quantity: str) -> dict[str, Estimate]:
        """Return the change of a quantity as a whole by candidate, of those for which it was measured."""
        rows = [row for row in self.rows_of(quantity) if row.scope == ALL]
        return {row.candidate: row.change for row in rows if row.change is not None}

    def frame(self) -> dict[str, list[Any]]:
        """Return the rows as columns, which `pandas.DataFrame` takes; those of the change begin with `change_`."""
        return columns(row.model_dump(mode="json") for row in self.rows)


class Report(Measured):
    """Rows of candidates; a verb adds its settings, and what its own figures show."""

    original: JudgedModel | None = Field(description="what candidates are compared with; None: scores alone")
    candidates: tuple[JudgedModel, ...] = Field(min_length=1)
    seconds: float = Field(ge=0)

    @property
    def exit_status(self) -> int:  # type: ignore[override]
        """1 if a candidate could not be measured."""
        return int(any(candidate.failed is not None for candidate in self.candidates))

    @property
    def models(self) -> tuple[JudgedModel, ...]:
        """The candidates and, last, the original if there is one."""
        return self.candidates if self.original is None else (*self.candidates, self.original)

    def title(self, what: str) -> str:
        """Return the title of a page: what was done, with which candidate, against which original."""
        against = "" if self.original is None else f" against {self.original.name}"
        return f"{what} of {self.candidates[0].name}{against}"

    def headline(self) -> dict[str, Any]:
        """Return the names of the models, and the rounded figures of each row; of a quantity with a whole row, of that.

        What is not known is left out.
        """
        whole = {row.quantity for row in self.rows if row.scope == ALL}
        rows = []
        for row in self.rows:
            if row.scope != ALL and row.quantity in whole:
                continue
            figures: dict[str, Any] = {"candidate": row.candidate, "quantity": row.quantity, "scope": row.scope}
            # Bytes are counted, so every digit holds; what is measured has fewer.
            for name, value in (("original", row.original), ("value", row.value)):
                if value is not None:
                    figures[name] = round(value) if row.unit == "bytes" else float(f"{value:.5g}")
            if row.change is not None:
                figures["change"] = float(f"{row.change.value:.5g}")
                if row.change.interval is not None:
                    figures["interval"] = [float(f"{end:.5g}") for end in row.change.interval]
                # a verdict of "not tested" is null in JSON
                figures["verdict"] = None if row.change.verdict is None else row.verdict
            rows.append(figures)
        return {
            "candidates": [model.name for model in self.candidates],
            "original": None if self.original is None else self.original.name,
            "failed": {model.name: model.failed for model in self.candidates if model.failed is not None},
            "rows": rows,
        }

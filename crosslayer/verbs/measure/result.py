"""What was measured: a row for each quantity and candidate, and what follows from them."""

from typing import Any, Literal

from pydantic import Field

from crosslayer.output.record import Frozen, ModelFacts, Options, Seed, columns
from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.stats.estimate import Better, Estimate

NEW = "a new domain"  # the scope of a prediction
Question = Literal["bytes", "kl", "needles", "time"]


class MeasureSettings(Options):
    """The options."""

    only: tuple[Question, ...]
    windows: int = Field(ge=1)
    length: int = Field(ge=2)
    context: int = Field(ge=1)
    lengths: tuple[int, ...]
    samples: int = Field(ge=1)
    repeats: int = Field(ge=1)
    seed: Seed
    bos: str


class MeasuredCandidate(Frozen):
    """A candidate, the engines that can serve it, and why it could not be measured, if so."""

    name: str
    engines: tuple[str, ...]
    failed: str | None = None


class Row(Frozen):
    """One quantity of a candidate, beside the original's."""

    quantity: str
    unit: str
    candidate: str
    scope: str = Field(default="all", description="all, or the domain, the length in tokens, or a new domain")
    original: float | None = None
    value: float | None = None
    change: Estimate = Field(description="candidate less original, or over it where `none` is 1")
    better: Better


class Measurement(Result):
    """What `crosslayer.measure` returns: every quantity of every candidate, in the form of one row."""

    schema_: Literal["crosslayer/measure/1"] = Field(default="crosslayer/measure/1", alias="schema")
    original: ModelFacts
    candidates: tuple[MeasuredCandidate, ...]
    rows: tuple[Row, ...]
    settings: MeasureSettings
    seconds: float

    @property
    def exit_status(self) -> int:  # type: ignore[override]
        """1 if a candidate could not be measured."""
        return int(any(candidate.failed is not None for candidate in self.candidates))

    def row(self, candidate: str, quantity: str, scope: str = "all") -> Row | None:
        """Return the row of a quantity; None if it was not measured."""
        for row in self.rows:
            if (row.candidate, row.quantity, row.scope) == (candidate, quantity, scope):
                return row
        return None

    def frame(self) -> dict[str, list[Any]]:
        """Return the rows as columns, which `pandas.DataFrame` takes."""
        return columns(row.model_dump() for row in self.rows)

    def tables(self) -> list[Table]:
        """Return the table of all candidates."""
        return [self.sibling("page").overview(self)]

    def headline(self) -> dict[str, Any]:
        """Return the main figures of each candidate."""
        figures: dict[str, Any] = {"model": self.original.name}
        for candidate in self.candidates:
            own = {}
            for quantity in ("bytes", "KL", "retrieval", "step"):
                row = self.row(candidate.name, quantity)
                if row is not None:
                    own[quantity] = round(row.change.value, 5)
            figures[candidate.name] = {"failed": candidate.failed} if candidate.failed else own
        return figures

"""What was measured: a row for each quantity and candidate."""

from typing import Literal

from pydantic import Field

from crosslayer.judge.report import Report
from crosslayer.output.record import Options, Seed
from crosslayer.output.shown import Table

Question = Literal["bytes", "kl", "needles", "tasks", "time"]


class MeasureSettings(Options):
    """The options."""

    only: tuple[Question, ...]
    tasks: tuple[str, ...] = ()
    limit: int | None = Field(default=None, ge=1)
    exact_layers: int = Field(default=0, ge=0)
    windows: int = Field(ge=1)
    length: int = Field(ge=2)
    context: int = Field(ge=1)
    lengths: tuple[int, ...]
    samples: int = Field(ge=1)
    repeats: int = Field(ge=1)
    seed: Seed
    bos: str


class Measurement(Report):
    """What `crosslayer.measure` returns: every quantity of every candidate, in the form of one row."""

    schema_: Literal["crosslayer/measure/2"] = Field(default="crosslayer/measure/2", alias="schema")
    settings: MeasureSettings

    def tables(self) -> list[Table]:
        """Return the table of all candidates."""
        return [self.sibling("page").overview(self)]

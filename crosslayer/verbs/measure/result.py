"""What was measured: a row for each quantity and candidate."""

import re
from typing import Literal

from pydantic import Field

from crosslayer.judge.report import Report
from crosslayer.output.formatting import Table
from crosslayer.output.record import Options, Seed

BITS = re.compile(r"(int|fp)?\d")  # what names of bits begin with
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

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the command that tries the candidate with the fewest bytes, of those that cost little."""
        best, following = self.sibling("page").least(self), super().next_command(model, out)
        if following is None or best is None or BITS.match(best):
            return following and best and following.removesuffix("4") + best.removeprefix("int")
        start = following.partition(" 'Once")[0].replace("generate", "needles", 1)
        return f"{start} --evict {best}" if ":" in best else f"crosslayer verify {best}"

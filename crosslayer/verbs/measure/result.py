"""What was measured, and its page: one table, one figure, one sentence of advice for each goal."""

import re
from typing import Literal

from pydantic import Field

from crosslayer.judge.page import bytes_and_kl, failures, found, listing
from crosslayer.judge.report import Report, Row
from crosslayer.judge.rows import NEW, WINDOW_QUANTITIES
from crosslayer.output.formatting import Table, listed, percent
from crosslayer.output.page import Cell, Page
from crosslayer.output.panel import Line, Panel
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.measure.exact_layers import FEW, flags, prices

BITS = re.compile(r"(int|fp)?\d")  # what names of bits begin with
BUDGETS = (0.01, 0.05)  # KL in nats/token that advice is given for
NOTHING = 1e-6  # KL below which no prediction has changed
HEADS = {
    "bytes": "KV cache",
    **{name: f"{name}, {unit}" if unit == "nats/token" else name for name, (unit, _) in WINDOW_QUANTITIES.items()},
    "retrieval": "numbers found",
    "ttft": "first token",
    "tpot_dynamic": "decoding step",
}
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

    schema_: Literal["crosslayer/measure/3"] = Field(default="crosslayer/measure/3", alias="schema")
    settings: MeasureSettings

    def layout(self) -> Page:
        """Return the page."""
        original, settings = self.original, self.settings
        assert original is not None
        tables = {"All candidates": [row for row in self.rows if row.scope == "all"]}
        tables["By domain, length and task"] = [row for row in self.rows if row.scope != "all"]
        return Page(
            title=f"Candidates against {original.name}",
            subtitle=(
                f"{settings.windows} windows of {settings.length} tokens · bytes and time after {settings.context:,} · "
                f"{original.place} · {self.seconds:.0f} s"
            ),
            panels=[*bytes_and_kl(self), *self._by_layer()],
            tables=[listing(title, rows) for title, rows in tables.items() if rows],
        )

    def sentences(self) -> list[str]:
        """Return advice for each goal, what the intervals are over, and which candidates failed."""
        lines, count = self._advice(), self.settings.exact_layers
        for kind, costs in prices(self.rows).items():
            if options := flags(costs, kind, count):
                lines.append(f"{kind} with {count} layers exact in {options}.")
        lines += failures(self)
        if self.changes("KL"):
            lines.append(
                "KL intervals are 95% bootstrap intervals over windows, conditional on these texts. For text "
                f"of another kind, use the prediction interval in the line “{NEW}”."
            )
        return lines

    def tables(self) -> list[Table]:
        """Return what was found, a block of lines for each candidate: it fits into a terminal of 80 columns."""
        lines: list[list[Cell]] = []
        for candidate in self.candidates:
            rows = {row.scope: row for row in reversed(self.rows) if row.candidate == candidate.name}
            own: list[tuple[str, str]] = []
            for name, head in HEADS.items():
                if (row := self.row(candidate.name, name)) is not None:
                    own.append((head, found(row)))
                if name == "KL" and row is not None:
                    own += self._domains(candidate.name)
            own += [(task, found(row)) for task, row in rows.items() if "items" in row.details]
            own.append(
                ("failed", candidate.failed)
                if candidate.failed
                else ("engines, untested", ", ".join(candidate.engines))
            )
            for number, line in enumerate(own):
                lines.append([candidate.name if not number else "", *line])
        return [("Candidates", ["candidate", "quantity", "found"], lines)]

    def _domains(self, candidate: str) -> list[tuple[str, str]]:
        """Return a candidate's KL on its worst domain, and what a new one may have."""
        damage = [row for row in self.rows_of("KL") if row.candidate == candidate and row.scope not in ("all", NEW)]
        worst = max(damage, key=lambda row: row.value or 0.0, default=None)
        new = self.row(candidate, "KL", NEW)
        lines = [] if worst is None else [("worst domain", f"{worst.scope} {worst.change_text()}")]
        return lines + ([] if new is None else [(NEW, found(new))])

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the command that tries the candidate with the fewest bytes, of those that cost little."""
        best, following = self.least(), super().next_command(model, out)
        if following is None or best is None or BITS.match(best):
            return following and best and following.removesuffix("4") + best.removeprefix("int")
        start = following.partition(" 'Once")[0].replace("generate", "needles", 1)
        return f"{start} --evict {best}" if ":" in best else f"crosslayer verify {best}"

    def least(self, budget: float = BUDGETS[-1]) -> str | None:
        """Return the candidate with the fewest bytes within a KL that finds the numbers which the original finds.

        Bits that change nothing were not seen at work.
        """
        sizes, damage, left_out = self.changes("bytes"), self.changes("KL"), {*self._unseen(), *self._forgetful()}
        within = [name for name in sizes if name in damage and damage[name].value <= budget and sizes[name].value < 1]
        return min(set(within) - left_out, key=lambda name: (sizes[name].value, name), default=None)

    def _forgetful(self) -> list[str]:
        """Return the candidates that find fewer hidden numbers than the original."""
        return [row.candidate for row in self.rows_of("retrieval") if row.scope == "all" and _lost(row)]

    def _unseen(self) -> list[str]:
        """Return the bits that changed nothing."""
        return [name for name, kl in self.changes("KL").items() if BITS.match(name) and abs(kl.value) < NOTHING]

    def _advice(self) -> list[str]:
        """Return the smallest candidate within each budget, and the fastest one."""
        lines = []
        sizes, damage, steps = (self.changes(name) for name in ("bytes", "KL", "tpot_dynamic"))
        within: dict[str | None, float] = {}
        for budget in BUDGETS if sizes and damage else ():
            name = self.least(budget)
            within[name] = within.get(name, budget) if name else budget
        for name, budget in within.items():
            line = f"No candidate is smaller than the original at a KL of at most {budget:g} nats/token."
            if name is not None:
                share = percent(sizes[name].value, 1)
                line = f"Fewest bytes at a KL of at most {budget:g} nats/token: {name}, {share} of the 16-bit cache."
            lines.append(line)
        small = [name for name in self._forgetful() if name in damage and damage[name].value <= BUDGETS[-1]]
        if small:
            lines.append(f"{listed(small)} lost hidden numbers, which a low KL does not outweigh.")
        if unseen := self._unseen():
            lines.append(
                f"{listed(unseen)} changed nothing in windows of {self.settings.length} tokens, since the newest "
                "tokens are kept as they are; measure with a larger --length."
            )
        faster = [name for name, change in steps.items() if change.is_better("lower")]
        if faster:
            fastest = min(faster, key=lambda name: steps[name].value)
            lines.append(f"Fastest decoding step: {fastest}, {steps[fastest].text(2)} of the original's time.")
        elif steps:
            lines.append("No candidate decodes faster than the original here.")
        return lines

    def _by_layer(self) -> list[Panel]:
        """Return the figure of what quantizing each layer alone costs."""
        lines = [Line(kind, list(map(float, own)), list(own.values())) for kind, own in prices(self.rows).items()]
        sentence = f"KL on {FEW} windows or fewer; KLs of single layers need not add up."
        panel = Panel("by_layer", "Quantizing one layer alone", sentence, "layer", "KL, nats/token", lines, log_y=True)
        return [panel] if lines else []


def _lost(row: Row) -> bool:
    return row.value is not None and row.original is not None and row.value < row.original

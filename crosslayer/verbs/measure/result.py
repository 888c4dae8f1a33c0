"""What was measured, and its page: one table, one figure, one sentence of advice for each goal."""

import re
from typing import Literal

from pydantic import Field

from crosslayer.judge.page import bytes_and_kl, failures, found, listing
from crosslayer.judge.report import Report
from crosslayer.judge.rows import NEW, WINDOW_QUANTITIES
from crosslayer.output.formatting import Table, listed, percent
from crosslayer.output.page import Cell, Page
from crosslayer.output.panel import Line, Panel
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.measure.exact_layers import FEW, flags, prices

BITS = re.compile(r"(int|fp)?\d")  # what names of bits begin with
BUDGETS = (0.01, 0.05)  # KL in nats/token that advice is given for
# KL below which no prediction has changed: 8 bits, which change least, cost 0.0001 or 0.0002 on three models.
NOTHING = 1e-6
HEADS = {
    "bytes": "KV cache",
    **{name: f"{name}, {unit}" if unit == "nats/token" else name for name, (unit, _) in WINDOW_QUANTITIES.items()},
    "retrieval": "numbers found",
    "ttft": "first token",
    "tpot_dynamic": "decoding step",
}
Aspect = Literal["bytes", "kl", "needles", "tasks", "time"]


class MeasureSettings(Options):
    """The options."""

    only: tuple[Aspect, ...]
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
        settings = self.settings
        assert self.original is not None
        tables = {"All candidates": [row for row in self.rows if row.scope == "all"]}
        tables["By domain, length and task"] = [row for row in self.rows if row.scope != "all"]

        panels = bytes_and_kl(self)
        by_layer = [Line(kind, list(map(float, kls)), list(kls.values())) for kind, kls in prices(self.rows).items()]
        if by_layer:
            title, axes = "Quantizing one layer alone", ("layer", "KL, nats/token")
            sentence = f"KL on {FEW} windows or fewer; KLs of single layers need not add up."
            panels.append(Panel("by_layer", title, sentence, *axes, by_layer, log_y=True))
        return Page(
            title=f"Candidates against {self.original.name}",
            subtitle=(
                f"{settings.windows} windows of {settings.length} tokens · bytes and time after {settings.context:,} · "
                f"{self.original.place} · {self.seconds:.0f} s"
            ),
            panels=panels,
            tables=[listing(title, rows) for title, rows in tables.items() if rows],
        )

    def sentences(self) -> list[str]:
        """Return advice for each goal, what the intervals are over, and which candidates failed."""
        # the smallest candidate within each budget, and the fastest one
        lines = []
        sizes, damage, steps = (self.changes(name) for name in ("bytes", "KL", "tpot_dynamic"))
        # A candidate that is best within both budgets is named once, with the smaller budget.
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
        forgetful, unseen = self._not_advised()
        small = [name for name in forgetful if name in damage and damage[name].value <= BUDGETS[-1]]
        if small:
            lines.append(f"{listed(small)} lost hidden numbers, which a low KL does not outweigh.")
        if unseen:
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

        count = self.settings.exact_layers
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
            name = candidate.name
            facts: list[tuple[str, str]] = []
            for quantity, head in HEADS.items():
                row = self.row(name, quantity)
                if row is None:
                    continue
                facts.append((head, found(row)))
                # What the mean over domains hides: the worst of them, and what another one may cost.
                if quantity == "KL":
                    by_domain = [row for row in self.rows_of("KL", candidate=name) if row.scope not in ("all", NEW)]
                    if by_domain:
                        worst = max(by_domain, key=lambda row: row.value or 0.0)
                        facts.append(("worst domain", f"{worst.scope} {worst.change_text()}"))
                    new = self.row(name, "KL", NEW)
                    facts += [] if new is None else [(NEW, found(new))]
            # A task may have several metrics, of which the first is shown.
            rows = {row.scope: row for row in reversed(self.rows) if row.candidate == name}
            facts += [(task, found(row)) for task, row in rows.items() if "items" in row.details]
            if candidate.failed:
                facts.append(("failed", candidate.failed))
            else:
                facts.append(("engines, untested", ", ".join(candidate.engines)))
            for index, fact in enumerate(facts):
                lines.append([name if index == 0 else "", *fact])
        return [("Candidates", ["candidate", "quantity", "found"], lines)]

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the command that tries the candidate with the fewest bytes, of those that cost little."""
        best = self.least()
        following = super().next_command(model, out)
        # NEXT of this verb quantizes to 4 bits.
        if following is None or best is None or BITS.match(best):
            return following and best and following.removesuffix("4") + best.removeprefix("int")
        start = following.partition(" 'Once")[0].replace("generate", "needles", 1)
        # An eviction loses what a low KL does not show, so hidden numbers come next; a model is checked first.
        return f"{start} --evict {best}" if ":" in best else f"crosslayer verify {best}"

    def least(self, budget: float = BUDGETS[-1]) -> str | None:
        """Return the candidate with the fewest bytes within a KL that finds the numbers which the original finds.

        Bits that change nothing were not seen at work.
        """
        sizes, damage = self.changes("bytes"), self.changes("KL")
        forgetful, unseen = self._not_advised()
        within = [name for name in sizes if name in damage and damage[name].value <= budget and sizes[name].value < 1]
        allowed = set(within).difference(forgetful, unseen)
        return min(allowed, key=lambda name: (sizes[name].value, name), default=None)

    def _not_advised(self) -> tuple[list[str], list[str]]:
        """Return the candidates that find fewer hidden numbers than the original, and the bits that changed nothing."""
        forgetful = []
        # Any loss counts: of retrofits with nearly the same perplexity, one found 9 of 40 numbers and one 34.
        for row in self.rows_of("retrieval"):
            if row.scope == "all" and row.value is not None and row.original is not None and row.value < row.original:
                forgetful.append(row.candidate)
        unseen = [name for name, kl in self.changes("KL").items() if BITS.match(name) and abs(kl.value) < NOTHING]
        return forgetful, unseen

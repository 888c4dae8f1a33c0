"""The page of a comparison, from its record alone."""

from crosslayer.output.page import Page
from crosslayer.verbs.compare.figures import drawn_panels
from crosslayer.verbs.compare.result import Comparison
from crosslayer.verbs.compare.tables import critical, domains, finals, insides, matched, scaling
from crosslayer.verbs.compare.words import sentences, signed, span


def layout(record: Comparison) -> Page:
    """Return the parts of the page."""
    return Page(
        title=f"Comparison: {record.name}",
        subtitle=_subtitle(record),
        cards=_cards(record),
        words=sentences(record),
        panels=drawn_panels(record),
        tables=[*matched(record), *domains(record), *insides(record), *critical(record), *scaling(record)],
        lead=finals(record),
    )


def _subtitle(record: Comparison) -> str:
    seeds = len({seed for result in record.outcomes for seed in result.seeds})
    machines = {run.machine.gpu or run.machine.processor for run in record.runs}
    machine = f" · {machines.pop()}" if len(machines) == 1 else ""
    tokens = sorted({run.tokens for run in record.runs})
    span_of_tokens = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    counted = f"{seeds} seed{'' if seeds == 1 else 's'}, paired"
    settings = f"{len(record.settings)} settings · " if len(record.settings) > 1 else ""
    return (
        f"{len(record.arms) - 1} beside {record.baseline} · {settings}{counted} · "
        f"{len(record.runs)} runs of {span_of_tokens} tokens{machine}"
    )


def _cards(record: Comparison) -> list[tuple[str, str, str]]:
    paired = [result for result in record.outcomes if result.final is not None]
    count = {kind: sum(result.verdict == kind for result in paired) for kind in ("lower", "higher", "undecided")}
    cards = [(f"{kind} than {record.baseline}".capitalize(), str(count[kind]), f"of {len(paired)}, at the end")
             for kind in ("lower", "higher")]  # fmt: skip
    cards.append(("Undecided", str(count["undecided"]), "no verdict from these seeds"))
    best = min(paired, key=lambda result: result.final.mean if result.final else 0.0, default=None)
    if best is not None and best.final is not None:
        cards.append((f"Lowest: {best.arm}", signed(best.final.mean), f"nats a token, {span(best.final.interval)}"))
    return cards

"""The page of a bench, from its record alone."""

from crosslayer.output.page import Page
from crosslayer.verbs.bench.figures import drawn_panels
from crosslayer.verbs.bench.record import Row
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.tables import details, overview
from crosslayer.verbs.bench.units import percent
from crosslayer.verbs.bench.words import TITLES, sentences, setting


def layout(record: Benchmark) -> Page:
    """Return the parts of the page."""
    return Page(
        title=f"Bench of {record.models.candidate.name} beside {record.models.baseline.name}",
        subtitle=_subtitle(record),
        cards=_cards(record.rows[-1], record.interval_coverage),
        words=sentences(record),
        panels=drawn_panels(record),
        tables=details(record),
        lead=[overview(record)],
    )


def _subtitle(record: Benchmark) -> str:
    settings, baseline, threads = record.settings, record.models.baseline, record.environment.machine.threads
    return (
        f"random tokens, {settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of runs, in "
        f"turns · {baseline.dtype} on {baseline.device}, {threads} thread{'s' if threads > 1 else ''} · "
        f"{settings.attention} attention"
    )


def _cards(row: Row, covered: float) -> list[tuple[str, str, str]]:
    place = setting(row)
    cards = [("KV cache", f"{row.cache.dynamic.ratio:.1%}", f"of the baseline's bytes, {place}")]
    for measure, time in row.times().items():
        interval = "no interval"
        if time.interval is not None:
            interval = f"{percent(covered)}: {time.interval[0]:.2f}-{time.interval[1]:.2f}"
        cards.append((TITLES[measure].capitalize(), f"{time.ratio:.2f}x", f"{interval}, {time.verdict}, {place}"))
    return cards

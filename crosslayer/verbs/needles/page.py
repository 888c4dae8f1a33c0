"""The page of a search for needles, from its record alone: a map of length and depth for each model, and tables."""

from collections.abc import Sequence

from crosslayer.output.page import Cell, Mark, Page, Table
from crosslayer.output.panel import Heat, Panel
from crosslayer.verbs.needles.record import Question, Score, Side
from crosslayer.verbs.needles.result import Needles
from crosslayer.verbs.needles.text import SOURCE
from crosslayer.verbs.needles.words import interval_of, keys_of, percent, points, sentences

SHOWN = 12  # answers on the page; the record has all


def layout(record: Needles) -> Page:
    """Return the parts of the page."""
    beside = "" if record.baseline is None else f" beside {record.baseline.name}"
    return Page(
        title=f"Needles of {record.candidate.name}{beside}",
        subtitle=_subtitle(record),
        cards=cards(record),
        words=sentences(record),
        panels=panels(record),
        tables=[cells(record), examples(record)],
        lead=[overview(record)],
    )


def cards(record: Needles) -> list[tuple[str, str, str]]:
    """Return the score at each length, and the baseline's below it."""
    shown = []
    for place, score in enumerate(record.candidate.by_length):
        note = interval_of(score)
        if record.baseline is not None:
            other = record.baseline.by_length[place]
            note += f"; baseline {percent(other.share)} ({interval_of(other)})"
        shown.append((f"{score.length:,} tokens", percent(score.share), note))
    return shown


def panels(record: Needles) -> list[Panel]:
    """Return a map of scores for the candidate and for the baseline."""
    drawn = [_map("candidate", record.candidate, record)]
    return drawn if record.baseline is None else [*drawn, _map("baseline", record.baseline, record)]


def overview(record: Needles) -> Table:
    """Return the score of each model by length, with the difference of both."""
    head = ["length", "model", "score", "95% interval", "found", "another key's", "difference to the baseline"]
    rows: list[list[Cell]] = []
    for place, length in enumerate(record.settings.lengths):
        for side in record.sides:
            score = side.by_length[place]
            differs = record.differences[place] if record.differences and side is record.candidate else None
            words = "" if differs is None else points(differs)
            rows.append([f"{length:,}", side.name, *_cells(score), words])
    if record.baseline is None:
        return "By length", head[:-1], [row[:-1] for row in rows]
    return "By length", head, rows


def cells(record: Needles) -> Table:
    """Return the score of each model by length and depth."""
    rows: list[list[Cell]] = []
    for place, score in enumerate(record.candidate.cells):
        for side in record.sides:
            rows.append([f"{score.length:,}", f"{score.depth}%", side.name, *_cells(side.cells[place])])
    head = ["length", "depth", "model", "score", "95% interval", "found", "another key's"]
    return "By length and depth", head, rows


def scores(side: Side, depths: Sequence[int]) -> Table:
    """Return the scores of a side: a row for each length, a column for each depth."""
    rows = []
    for number, whole in enumerate(side.by_length):
        cells = side.cells[number * len(depths) : (number + 1) * len(depths)]
        rows.append([f"{whole.length:,}", *(percent(score.share) for score in (*cells, whole))])
    return side.name, ["length", *(f"depth {depth}%" for depth in depths), "all"], rows


def examples(record: Needles) -> Table:
    """Return the first answers, one for each length and depth."""
    rows: list[list[Cell]] = []
    for place, question in enumerate(record.questions):
        if question.index == 0 and len(rows) < SHOWN:
            for side in record.sides:
                rows.append(_example(question, side, side.answers[place]))
    head = ["length", "depth", "model", "key", "number", "answer"]
    return "Answers: the first of a length and depth", head, rows


def _example(question: Question, side: Side, answer: str) -> list[Cell]:
    """Return an answer, with how it begins."""
    right = Mark(question.value, "pass" if question.value in answer else "fail")
    return [f"{question.length:,}", f"{question.depth}%", side.name, question.key, right, answer.strip()]


def _map(key: str, side: Side, record: Needles) -> Panel:
    """Return the map of a side's scores, in per cent: a row for each length, a column for each depth."""
    lengths, depths = record.settings.lengths, record.settings.depths
    rows = [side.cells[start : start + len(depths)] for start in range(0, len(side.cells), len(depths))]
    heat = Heat(
        [place - 0.5 for place in range(len(depths) + 1)],
        [*range(len(lengths))],
        [[100 * score.share for score in row] for row in rows],
        "score, %",
        (0.0, 100.0),
        columns=[f"{depth}%" for depth in depths],
        written=True,
    )
    return Panel(
        f"scores_{key}",
        side.name if record.baseline is None else f"{side.name}, {key}",
        _sentence(side),
        "depth of the needle, %",
        "length, tokens",
        heat=heat,
        wide=record.baseline is None,
        x_ticks={place: str(depth) for place, depth in enumerate(depths)},
        y_ticks={place: f"{length:,}" for place, length in enumerate(lengths)},
    )


def _sentence(side: Side) -> str:
    """Return where a side finds least, and where most."""
    least, most = min(side.cells, key=_share), max(side.cells, key=_share)
    if least.share == most.share:
        return f"Everywhere {percent(most.share)}."
    return f"Most: {_place(most)}. Least: {_place(least)}."


def _share(score: Score) -> float:
    return score.share


def _place(score: Score) -> str:
    return f"{percent(score.share)} ({interval_of(score)}) at {score.length:,} tokens, depth {score.depth}%"


def _cells(score: Score) -> list[Cell]:
    return [percent(score.share), interval_of(score), f"{score.found} of {score.n}", f"{score.other} of {score.n}"]


def _subtitle(record: Needles) -> str:
    settings = record.settings
    return (
        f"needle in a haystack (RULER, arXiv 2404.06654): the number of {keys_of(settings.keys)}, in {SOURCE} · seed "
        f"{settings.seed} · {record.candidate.dtype} on {record.candidate.device} · {record.seconds:.0f} s"
    )

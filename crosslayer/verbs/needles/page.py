"""The page of a search for needles, from its record alone: a map of length and depth for each model, and tables."""

from crosslayer.output.formatting import percent, percent_interval
from crosslayer.output.page import Cell, Mark, Page, Table
from crosslayer.output.panel import Heat, Panel
from crosslayer.verbs.needles.record import FoundShare
from crosslayer.verbs.needles.result import Needles
from crosslayer.verbs.needles.text import SOURCE
from crosslayer.verbs.needles.words import keys_of, points, sentences, share

SHOWN = 12  # answers on the page; the record has all
SCORE = ["score", "95% interval", "found", "another key's"]


def layout(record: Needles) -> Page:
    """Return the parts of the page."""
    candidate, baseline, settings = record.candidate, record.baseline, record.settings
    cards = []
    for score, *others in zip(*record.by_length, strict=True):
        beside = "".join(f"; baseline {share(other)}" for other in others)
        note = f"{percent_interval(score.interval)}{beside}"
        cards.append((f"{score.length:,} tokens", percent(score.share), note))
    return Page(
        title=f"Needles of {candidate.name}" + ("" if baseline is None else f" beside {baseline.name}"),
        subtitle=(
            f"needle in a haystack (RULER, arXiv 2404.06654): the number of {keys_of(settings.keys)}, in {SOURCE} · "
            f"seed {settings.seed} · {candidate.dtype} on {candidate.device} · {record.seconds:.0f} s"
        ),
        cards=cards,
        sentences=sentences(record),
        panels=[_map(number, record) for number in range(len(record.sides))],
        tables=[_by_depth(record), _examples(record)],
        lead=[_by_length(record)],
    )


def scores(record: Needles) -> list[Table]:
    """Return the scores of each side: a row for each length, a column for each depth."""
    depths, tables = record.settings.depths, []
    for side, cells, by_length in zip(record.sides, record.cells, record.by_length, strict=True):
        rows = []
        for number, whole in enumerate(by_length):
            row = [*cells[number * len(depths) : (number + 1) * len(depths)], whole]
            rows.append([f"{whole.length:,}", *(percent(score.share) for score in row)])
        tables.append((side.name, ["length", *(f"depth {depth}%" for depth in depths), "all"], rows))
    return tables


def _by_length(record: Needles) -> Table:
    rows: list[list[Cell]] = []
    for place, length in enumerate(record.settings.lengths):
        for side, by_length in zip(record.sides, record.by_length, strict=True):
            rows.append([f"{length:,}", side.name, *_cells(by_length[place])])
            if record.differences:
                rows[-1].append(points(record.differences[place]) if side is record.candidate else "")
    head = ["length", "model", *SCORE, *(["difference to the baseline"] if record.differences else [])]
    return "By length", head, rows


def _by_depth(record: Needles) -> Table:
    rows: list[list[Cell]] = []
    for scores in zip(*record.cells, strict=True):
        for side, score in zip(record.sides, scores, strict=True):
            rows.append([f"{score.length:,}", f"{score.depth}%", side.name, *_cells(score)])
    return "By length and depth", ["length", "depth", "model", *SCORE], rows


def _cells(score: FoundShare) -> list[Cell]:
    counts = [f"{score.found} of {score.n}", f"{score.other} of {score.n}"]
    return [percent(score.share), percent_interval(score.interval), *counts]


def _examples(record: Needles) -> Table:
    rows: list[list[Cell]] = []
    for place, question in enumerate(record.questions):
        if question.index == 0 and len(rows) < SHOWN:
            for side in record.sides:
                answer = side.answers[place]
                right = Mark(question.value, "pass" if question.value in answer else "fail")
                cell = [f"{question.length:,}", f"{question.depth}%", side.name]
                rows.append([*cell, question.key, right, answer.strip()])
    head = ["length", "depth", "model", "key", "number", "answer"]
    return "Answers: the first of a length and depth", head, rows


def _map(number: int, record: Needles) -> Panel:
    """Return the map of a side's scores, in per cent: a row for each length, a column for each depth."""
    lengths, depths, cells = record.settings.lengths, record.settings.depths, record.cells[number]
    side, key = record.sides[number], ("candidate", "baseline")[number]
    least, most = min(cells, key=lambda score: score.share), max(cells, key=lambda score: score.share)
    words = f"Everywhere {percent(most.share)}."
    if least.share < most.share:
        places = [f"{share(score)} at {score.length:,} tokens, depth {score.depth}%" for score in (most, least)]
        words = f"Most: {places[0]}. Least: {places[1]}."
    heat = Heat(
        [place - 0.5 for place in range(len(depths) + 1)],
        [*range(len(lengths))],
        (100 * record.scores[number]).tolist(),
        "score, %",
        (0.0, 100.0),
        columns=[f"{depth}%" for depth in depths],
        written=True,
    )
    return Panel(
        f"scores_{key}",
        side.name if record.baseline is None else f"{side.name}, {key}",
        words,
        "depth of the needle, %",
        "length, tokens",
        heat=heat,
        wide=record.baseline is None,
        x_ticks={place: str(depth) for place, depth in enumerate(depths)},
        y_ticks={place: f"{length:,}" for place, length in enumerate(lengths)},
    )

"""The page of a needle test, from its record alone: a map of scores by length and depth for each model, and tables."""

from crosslayer.judge.phrasing import SOURCE
from crosslayer.output.formatting import percent
from crosslayer.output.page import Cell, Mark, Page, Table
from crosslayer.output.panel import Heat, Panel
from crosslayer.stats.shares import in_points
from crosslayer.verbs.needles.record import Score
from crosslayer.verbs.needles.result import Needles
from crosslayer.verbs.needles.sentences import hidden_numbers, sentences

SHOWN = 12  # answers on the page; the record has all
SCORE = ["score\n(95% interval)", "retrieved", "another key's number"]


def layout(record: Needles) -> Page:
    """Return the page."""
    candidate, baseline, settings = record.candidate, record.baseline, record.settings
    cards = []
    for score, *others in zip(*record.by_length, strict=True):
        note = "".join(f"baseline {other.share.text(0, percent=True)}; " for other in others)
        cards.append((f"{score.length:,} tokens", score.share.text(0, percent=True), f"{note}95% intervals"))
    return Page(
        title=f"Needle test of {candidate.name}" + ("" if baseline is None else f" against {baseline.name}"),
        subtitle=(
            f"needle in a haystack (RULER, arXiv 2404.06654): {hidden_numbers(settings.keys)} in {SOURCE} · "
            f"seed {settings.seed} · {candidate.dtype} on {candidate.device} · {record.seconds:.0f} s"
        ),
        cards=cards,
        sentences=sentences(record),
        panels=[_map(number, record) for number in range(len(record.models))],
        tables=[_by_depth(record), _examples(record)],
        lead=[_by_length(record)],
    )


def scores(record: Needles) -> list[Table]:
    """Return a table of scores for each model: a row for each length, a column for each depth."""
    depths, tables = record.settings.depths, []
    for model, cells, by_length in zip(record.models, record.cells, record.by_length, strict=True):
        rows = []
        for number, whole in enumerate(by_length):
            row = [*cells[number * len(depths) : (number + 1) * len(depths)], whole]
            rows.append([f"{whole.length:,}", *(percent(score.share.value) for score in row)])
        tables.append((model.name, ["length", *(f"depth {depth}%" for depth in depths), "all"], rows))
    return tables


def _by_length(record: Needles) -> Table:
    rows: list[list[Cell]] = []
    for number, length in enumerate(record.settings.lengths):
        for model, by_length in zip(record.models, record.by_length, strict=True):
            rows.append([f"{length:,}", model.name, *_cells(by_length[number])])
            if record.differences:
                change = in_points(record.differences[number].change).text(0, signed=True)
                rows[-1].append(change if model is record.candidate else "")
    head = ["length", "model", *SCORE, *(["points from baseline\n(95% interval)"] if record.differences else [])]
    return "By length", head, rows


def _by_depth(record: Needles) -> Table:
    rows: list[list[Cell]] = []
    for scores in zip(*record.cells, strict=True):
        for model, score in zip(record.models, scores, strict=True):
            rows.append([f"{score.length:,}", f"{score.depth}%", model.name, *_cells(score)])
    return "By length and depth", ["length", "depth", "model", *SCORE], rows


def _cells(score: Score) -> list[Cell]:
    counts = [f"{count} of {score.share.n}" for count in (score.retrieved, score.other)]
    return [score.share.text(0, percent=True), *counts]


def _examples(record: Needles) -> Table:
    rows: list[list[Cell]] = []
    for number, question in enumerate(record.questions):
        if question.index == 0 and len(rows) < SHOWN:
            for model in record.models:
                answer = model.answers[number]
                right = Mark(question.value, "pass" if question.value in answer else "fail")
                cell = [f"{question.length:,}", f"{question.depth}%", model.name]
                rows.append([*cell, question.key, right, answer.strip()])
    head = ["length", "depth", "model", "key", "number", "answer"]
    return "Answers: the first of each length and depth", head, rows


def _map(number: int, record: Needles) -> Panel:
    """Return the map of a model's scores in percent: a row for each length, a column for each depth."""
    lengths, depths, cells = record.settings.lengths, record.settings.depths, record.cells[number]
    model, role = record.models[number], ("candidate", "baseline")[number]
    worst, best = (end(cells, key=lambda score: score.retrieved) for end in (min, max))
    caption = f"{percent(best.share.value)} at every length and depth."
    if worst.retrieved < best.retrieved:
        ends = [
            f"{score.share.text(0, percent=True)} at {score.length:,} tokens, depth {score.depth}%"
            for score in (best, worst)
        ]
        caption = f"Best: {ends[0]}. Worst: {ends[1]}. In parentheses: 95% intervals."
    shares: list[float | None] = [100 * score.share.value for score in cells]
    heat = Heat(
        [edge - 0.5 for edge in range(len(depths) + 1)],
        [*range(len(lengths))],
        [shares[start : start + len(depths)] for start in range(0, len(shares), len(depths))],
        "score, %",
        (0.0, 100.0),
        columns=[f"{depth}%" for depth in depths],
        written=True,
    )
    return Panel(
        f"scores_{role}",
        model.name if record.baseline is None else f"{model.name}, {role}",
        caption,
        "depth of the needle, %",
        "length, tokens",
        heat=heat,
        wide=record.baseline is None,
        x_ticks={column: str(depth) for column, depth in enumerate(depths)},
        y_ticks={row: f"{length:,}" for row, length in enumerate(lengths)},
    )

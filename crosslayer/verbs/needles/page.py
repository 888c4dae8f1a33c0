"""The page of a needle test, from its record alone: a map of scores by length and depth for each model, and tables."""

from crosslayer.cache.running import CacheOptions
from crosslayer.judge.hidden import SOURCE
from crosslayer.judge.page import by_verdict, listing
from crosslayer.output.formatting import Table, listed, percent
from crosslayer.output.page import Cell, Mark, Page
from crosslayer.output.panel import Heat, Panel
from crosslayer.verbs.needles.result import Needles

SHOWN = 12  # answers on the page; the record has all
LOW = 0.05  # a baseline's score below which a candidate has nothing to lose


def layout(record: Needles) -> Page:
    """Return the page."""
    candidate, settings = record.candidates[0], record.settings
    assert candidate.model is not None
    cards = []
    for row in record.rows:
        note = "" if row.original is None else f"baseline {percent(row.original)}; "
        own = record.score(0, int(row.scope.split()[0]))
        cards.append((row.scope, own.text(0, percent=True), f"{note}95% intervals"))
    against = "" if record.original is None else f" against {record.original.name}"
    return Page(
        title=f"Needle test of {candidate.name}{against}",
        subtitle=(
            f"needle in a haystack (RULER, arXiv 2404.06654): {hidden_numbers(settings.keys)} in {SOURCE} · "
            f"seed {settings.seed} · {candidate.model.dtype} on {candidate.model.device} · {record.seconds:.0f} s"
        ),
        cards=cards,
        sentences=sentences(record),
        panels=[_map(record, number) for number in range(len(record.models))],
        tables=[_examples(record)],
        lead=[listing("By length", record.rows, {"samples": "samples", "other_key": "another key's number"}, "length")],
    )


def sentences(record: Needles) -> list[str]:
    """Return the scores of each model by length, the differences, and how both are measured."""
    settings, written, paired = record.settings, [], ""
    for number, model in enumerate(record.models):
        role = "baseline" if number else "candidate"
        name = f"The {role}, {model.name}," if record.original is not None or ", " in model.name else model.name
        scores = [f"{record.score(number, size).text(0, percent=True)} at {size:,}" for size in settings.lengths]
        written.append(f"{name} retrieves {hidden_numbers(settings.keys)}: {', '.join(scores)} tokens.")
    if settings.keys > 1:
        other = sum(int(row.details["other_key"]) for row in record.rows)
        total = sum(int(row.details["samples"]) for row in record.rows)
        written.append(f"{percent(other / total)} of the candidate's answers give another key's number.")
    if record.original is not None:
        paired = "; Agresti and Min for paired differences, with McNemar's test"
        written += by_verdict(record.rows)
        low = [row.scope for row in record.rows if row.original is not None and row.original < LOW]
        if low:
            written.append(
                f"At {listed(low)} the baseline itself retrieves fewer than {LOW:.0%}, so the candidate has nothing to "
                "lose there."
            )
    written += CacheOptions(settings.evict, settings.kv_bits).sentences()
    depths = len(settings.depths)
    return [
        *written,
        f"A score is the share of greedy answers (up to {settings.new_tokens} tokens) that contain the number, over "
        f"{depths * settings.samples} samples per length: {settings.samples} at each of {depths} depths. 95% intervals "
        f"over samples: Wilson for scores{paired}.",
    ]


def hidden_numbers(count: int) -> str:
    """Return what is asked for in a text with `count` keys."""
    return "the hidden number" if count == 1 else f"one of {count} hidden numbers"


def scores(record: Needles) -> list[Table]:
    """Return a table of scores for each model: a row for each length, a column for each depth."""
    depths, tables = record.settings.depths, []
    for number, model in enumerate(record.models):
        rows = []
        for length in record.settings.lengths:
            cells = [record.score(number, length, depth) for depth in (*depths, None)]
            rows.append([f"{length:,}", *(percent(score.value) for score in cells)])
        tables.append((model.name, ["length", *(f"depth {depth}%" for depth in depths), "all"], rows))
    return tables


def _examples(record: Needles) -> Table:
    rows: list[list[Cell]] = []
    for number, question in enumerate(record.questions):
        if question.index == 0 and len(rows) < SHOWN:
            for model, answers in zip(record.models, record.answers, strict=True):
                right = Mark(question.value, "pass" if question.value in answers[number] else "fail")
                cells = [f"{question.length:,}", f"{question.depth}%", model.name, question.key]
                rows.append([*cells, right, answers[number].strip()])
    head = ["length", "depth", "model", "key", "number", "answer"]
    return "Answers: the first of each length and depth", head, rows


def _map(record: Needles, number: int) -> Panel:
    """Return the map of a model's scores in percent: a row for each length, a column for each depth."""
    settings, model, role = record.settings, record.models[number], ("candidate", "baseline")[number]
    cells = {cell: record.score(number, *cell) for cell in settings.cells}
    best, worst = (end(cells, key=lambda cell: cells[cell].value) for end in (max, min))
    caption = f"{percent(cells[best].value)} at every length and depth."
    if cells[worst].value < cells[best].value:
        ends = [
            f"{cells[length, depth].text(0, percent=True)} at {length:,} tokens, depth {depth}%"
            for length, depth in (best, worst)
        ]
        caption = f"Best: {ends[0]}. Worst: {ends[1]}. In parentheses: 95% intervals."
    lengths, depths = settings.lengths, settings.depths
    heat = Heat(
        [edge - 0.5 for edge in range(len(depths) + 1)],
        [*range(len(lengths))],
        [[100 * cells[length, depth].value for depth in depths] for length in lengths],
        "score, %",
        (0.0, 100.0),
        columns=[f"{depth}%" for depth in depths],
        written=True,
    )
    title, axes = model.name, ("depth of the needle, %", "length, tokens")
    if record.original is not None:
        title += f", {role}"
    x_ticks = {float(column): str(depth) for column, depth in enumerate(depths)}
    y_ticks = {float(row): f"{length:,}" for row, length in enumerate(lengths)}
    drawn = {"heat": heat, "wide": record.original is None, "x_ticks": x_ticks, "y_ticks": y_ticks}
    return Panel(f"scores_{role}", title, caption, *axes, **drawn)

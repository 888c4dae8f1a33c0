"""The page of an evaluation, from its record alone."""

from crosslayer.output.page import Mark, Page, Table
from crosslayer.output.panel import Dots, Panel
from crosslayer.stats import Interval
from crosslayer.verbs.bench.units import size
from crosslayer.verbs.evaluate.groups import LOCAL
from crosslayer.verbs.evaluate.record import GroupRow, ModelFacts, Row
from crosslayer.verbs.evaluate.result import Evaluation
from crosslayer.verbs.evaluate.words import UNKNOWN, difference, score, score_of, sentences, signed, times_of, title

KINDS = {"better": "pass", "worse": "fail", "no difference seen": "skip"}
HEAD = ["task", "metric", "baseline", "candidate", "difference (95 %)", "items", "verdict", "items for 1 point"]
ALONE = ["task", "metric", "score ± standard error", "items", "examples"]
LONGEST = 16  # characters of a name in a figure
Drawn = tuple[str, float, float | None, float | None]  # name, estimate, ends of its interval


def layout(record: Evaluation) -> Page:
    """Return the parts of the page."""
    candidate, baseline = record.models.candidate, record.models.baseline
    beside = "" if baseline is None else f" beside {baseline.name}"
    return Page(
        title=f"Evaluation of {candidate.name}{beside}",
        subtitle=_subtitle(record),
        cards=_cards(record),
        words=sentences(record),
        panels=_panels(record),
        tables=[_models(record)],
        lead=tables(record),
    )


def tables(record: Evaluation) -> list[Table]:
    """Return the table of groups, if there are any, and that of tasks."""
    if record.models.baseline is None:
        rows = [
            [row.task, _metric(row), score_of(row, row.candidate), f"{row.items:,}", str(row.shots)]
            for row in record.rows
        ]
        groups = [
            [row.group, row.metric, score(row.candidate, "share"), f"{row.items:,}", UNKNOWN] for row in record.groups
        ]
        return [("Scores", ALONE, [*groups, *rows])]
    found: list[Table] = [_together(record)] if record.cost is not None else []
    if record.groups:
        head = ["group", *HEAD[1:-1]]
        found.append(("Groups: means over tasks, in points", head, [_group_cells(row) for row in record.groups]))
    unit = "candidate − baseline in points, or candidate ÷ baseline for perplexities"
    return [*found, (f"Tasks: {unit}", HEAD, [_cells(row) for row in record.rows])]


def _together(record: Evaluation) -> Table:
    """Return cache, times and the first scores in a table."""
    cost, rows = record.cost, (record.groups or record.rows)[:4]
    assert cost is not None
    head = ["", "KV cache", "share", "first token", "further tokens", *map(title, rows)]
    table: list[list] = []
    for side, share, times in (
        ("baseline", "100%", ("× 1", "× 1")),
        ("candidate", f"{cost.cache.ratio:.2%}", (times_of(cost.ttft), times_of(cost.tpot))),
    ):
        bytes_ = dict(cost.cache.named_sides())[side]  # type: ignore[index]
        table.append([side, size(bytes_), share, *times, *(_score_on(side, row) for row in rows)])
    return f"Cache and times at {cost.context} tokens, and scores", head, table


def _score_on(side: str, row: Row | GroupRow) -> str:
    value = row.candidate if side == "candidate" else row.baseline
    if isinstance(row, Row):
        return score_of(row, value)  # type: ignore[arg-type]
    return UNKNOWN if value is None else score(value, "share")  # type: ignore[arg-type]


def _subtitle(record: Evaluation) -> str:
    settings, model, threads = record.settings, record.models.candidate, record.environment.machine.threads
    shots = "as tasks have them" if settings.num_fewshot is None else str(settings.num_fewshot)
    asked = "all items" if settings.limit is None else f"the first {settings.limit} items"
    return (
        f"lm-eval {record.lm_eval}, {asked} of each task · examples: {shots} · batch {settings.batch} · "
        f"{model.dtype} on {model.device}, {threads} thread{'s' if threads > 1 else ''}"
    )


def _cards(record: Evaluation) -> list[tuple[str, str, str]]:
    """Return large figures of the groups, or where there are none of the first tasks."""
    cards = []
    for row in (record.groups or record.rows)[:4]:
        kind = "share" if isinstance(row, GroupRow) else row.kind
        value = row.candidate if isinstance(row, GroupRow) else row.candidate.value
        note = "" if row.paired is None else f"{difference(row.paired, kind)}: {row.paired.verdict}"
        cards.append((title(row), score(value, kind), note))
    return cards


def _panels(record: Evaluation) -> list[Panel]:
    """Return a forest of differences in points, and one of ratios of perplexities."""
    panels = []
    points: list[Drawn] = []
    for row in (*record.groups, *record.rows):
        kind = "share" if isinstance(row, GroupRow) else row.kind
        if row.paired is not None and kind == "share":
            points.append((_label(row), 100 * row.paired.estimate, *_percents(row.paired.interval, 0.0)))
    if points:
        words = (
            "Candidate − baseline: right of 0 the candidate has more items right. Bars: 95 % intervals, paired by item."
        )
        panels.append(_forest("differences", "Differences", words, "points", points))
    ratios: list[Drawn] = []
    for row in record.rows:
        if row.paired is not None and row.paired.form == "ratio":
            ratios.append((_label(row), 100 * (row.paired.estimate - 1), *_percents(row.paired.interval, 1.0)))
    if ratios:
        words = "Candidate's above the baseline's: left of 0 it is lower. Bars: 95 % intervals, paired by item."
        panels.append(_forest("perplexities", "Perplexities", words, "% above", ratios))
    return panels


def _label(row: Row | GroupRow) -> str:
    """Name a row of a figure, in little room: the ends of a long name tell it from others."""
    name = (row.task if isinstance(row, Row) else row.group).removesuffix(LOCAL)
    short = name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}…{name[-8:]}"
    return f"{short} ({row.metric if isinstance(row, GroupRow) else _metric(row)})"


def _percents(interval: Interval | None, nothing: float) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (100 * (interval[0] - nothing), 100 * (interval[1] - nothing))


def _forest(key: str, heading: str, words: str, axis: str, rows: list[Drawn]) -> Panel:
    names, x, low, high = (list(column) for column in zip(*rows, strict=True))
    dots = Dots(names=names, x=x, low=low, high=high, single=[[] for _ in rows])
    return Panel(key, heading, words, axis, "", dots=dots)


def _cells(row: Row) -> list:
    needed = None if row.paired is None else row.paired.items_for_a_point
    only = "" if row.paired is None or row.paired.discordant is None else _only(row)
    return [
        row.task,
        _metric(row),
        score_of(row, row.baseline),
        score_of(row, row.candidate),
        difference(row.paired, row.kind).replace(" (", "\n("),
        f"{row.items:,}{only}",
        UNKNOWN if row.paired is None else Mark(row.paired.verdict, KINDS[row.paired.verdict]),
        UNKNOWN if needed is None else f"{needed:,}" + ("\n(1 %)" if row.kind == "perplexity" else ""),
    ]


def _only(row: Row) -> str:
    """Return how many items only one of both has right, and McNemar's p."""
    assert row.paired is not None and row.paired.discordant is not None
    both = row.paired.discordant
    return f"\n+{both.candidate} {signed(-both.baseline, 0)}\np = {row.paired.p:.2g}"


def _group_cells(row: GroupRow) -> list:
    return [
        row.group,
        row.metric,
        UNKNOWN if row.baseline is None else score(row.baseline, "share"),
        score(row.candidate, "share"),
        difference(row.paired, "share"),
        f"{row.items:,}",
        UNKNOWN if row.paired is None else Mark(row.paired.verdict, KINDS[row.paired.verdict]),
    ]


def _metric(row: Row) -> str:
    return row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"


def _models(record: Evaluation) -> Table:
    """Return the table of models and of the tasks of each group."""
    rows = []
    for side, facts in (("candidate", record.models.candidate), ("baseline", record.models.baseline)):
        if facts is not None:
            rows.append([side, _facts(facts)])
    rows += [[row.group, ", ".join(row.tasks)] for row in record.groups]
    return "Models and groups", ["what", "it is"], [*rows, ["lm-eval", record.lm_eval]]


def _facts(facts: ModelFacts) -> str:
    return (
        f"{facts.name} ({facts.class_}, {facts.parameters / 1e6:.1f} M parameters, {facts.dtype}), "
        f"evaluated in {facts.seconds:.0f} s"
    )

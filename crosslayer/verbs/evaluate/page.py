"""The page of an evaluation, from its record alone."""

from crosslayer.output.formatting import UNKNOWN, readable_bytes
from crosslayer.output.page import Mark, Page, Table
from crosslayer.output.panel import Dots, Panel
from crosslayer.verbs.evaluate.harness import LOCAL
from crosslayer.verbs.evaluate.record import ScoreRow
from crosslayer.verbs.evaluate.result import Evaluation
from crosslayer.verbs.evaluate.sentences import difference, score, sentences

KINDS = {True: "pass", False: "fail", None: "skip"}  # by whether the candidate is better
HEAD = [
    "task",
    "metric",
    "baseline",
    "candidate",
    "difference\n(95% interval)",
    "items",
    "verdict",
    "items for 1 point",
]


def layout(record: Evaluation) -> Page:
    """Return the page."""
    baseline, shots, limit = record.models.baseline, record.settings.num_fewshot, record.settings.limit
    candidate, first = record.models.candidate, (record.groups or record.rows)[:4]
    against = "" if baseline is None else f" against {baseline.name}"
    notes = ["" if row.paired is None else f"{difference(row)}: {row.paired.change.verdict}" for row in first]
    return Page(
        title=f"Evaluation of {candidate.name}{against}",
        subtitle=(
            f"lm-eval {record.lm_eval}, {'all' if limit is None else f'the first {limit}'} items of each task · "
            f"few-shot examples: {'task default' if shots is None else shots} · {candidate.dtype} on {candidate.device}"
        ),
        cards=[(row.title, score(row, row.candidate), note) for row, note in zip(first, notes, strict=True)],
        sentences=sentences(record),
        panels=_panels(record),
        tables=[_models(record)],
        lead=tables(record),
    )


def tables(record: Evaluation) -> list[Table]:
    """Return the table of groups, if there are any, and the table of tasks."""
    if record.models.baseline is None:
        head = ["task", "metric", "score ± standard error", "items", "examples"]
        rows = [
            [row.name, _metric(row), score(row, row.candidate), f"{row.items:,}", UNKNOWN if row.tasks else row.shots]
            for row in (*record.groups, *record.rows)
        ]
        return [("Scores", head, [[str(cell) for cell in row] for row in rows])]
    first: list[Table] = [_cost(record)] if record.cost is not None else []
    if record.groups:
        head = ["group", *HEAD[1:-1]]
        first.append(("Groups: means over tasks, in points", head, [_cells(row)[:-1] for row in record.groups]))
    unit = "candidate − baseline in points, or candidate ÷ baseline for perplexities"
    return [*first, (f"Tasks: {unit}", HEAD, [_cells(row) for row in record.rows])]


def _cost(record: Evaluation) -> Table:
    cost, rows = record.cost, (record.groups or record.rows)[:4]
    assert cost is not None
    cache = cost.cache.dynamic
    ours = [readable_bytes(cache.candidate), f"{cache.ratio:.2%}", cost.ttft.text(), cost.tpot_dynamic.text()]
    table = [
        ["baseline", readable_bytes(cache.baseline), "100%", "1x", "1x", *(score(row, row.baseline) for row in rows)],
        ["candidate", *ours, *(score(row, row.candidate) for row in rows)],
    ]
    head = ["", "KV cache", "of baseline", "time to first token", "time per token", *(row.title for row in rows)]
    return f"KV cache and latency at {cost.context} tokens, and scores", head, table


def _cells(row: ScoreRow) -> list:
    paired, items, needed = row.paired, f"{row.items:,}", UNKNOWN
    if paired is not None and paired.discordant is not None:  # items that only one model gets right, McNemar's p
        items += f"\n+{paired.discordant.candidate} −{paired.discordant.baseline}\np = {paired.change.p:.2g}"
    if paired is not None and paired.items_for_a_point is not None:
        needed = f"{paired.items_for_a_point:,}" + ("\n(1%)" if row.kind == "perplexity" else "")
    return [
        row.name,
        _metric(row),
        score(row, row.baseline),
        score(row, row.candidate),
        difference(row).replace(" (", "\n("),
        items,
        UNKNOWN if paired is None else Mark(paired.change.verdict, KINDS[row.is_better]),
        needed,
    ]


def _metric(row: ScoreRow) -> str:
    return row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"


def _panels(record: Evaluation) -> list[Panel]:
    """Return a figure of differences in points, and one of ratios of perplexities."""
    rows = [row for row in (*record.groups, *record.rows) if row.paired is not None]
    shares, ratios = [row for row in rows if row.kind == "share"], [row for row in rows if row.kind == "perplexity"]
    bars = "Error bars: 95% intervals, paired by item."
    panels = []
    if shares:
        caption = f"Candidate − baseline: to the right of 0 the candidate answers more items correctly. {bars}"
        panels.append(Panel("differences", "Differences", caption, "points", "", dots=_dots(shares)))
    if ratios:
        caption = f"How far the candidate's perplexity is above the baseline's; to the left of 0 it is lower. {bars}"
        panels.append(Panel("perplexities", "Perplexities", caption, "% above", "", dots=_dots(ratios)))
    return panels


def _dots(rows: list[ScoreRow]) -> Dots:
    """Return differences, or how far ratios are above 1, in percent."""
    changes = [row.paired.change for row in rows if row.paired is not None]
    changes = [change.mapped(lambda value, none=change.none: 100 * (value - none)) for change in changes]
    return Dots(
        names=[f"{row.name.removesuffix(LOCAL)} ({_metric(row)})" for row in rows],
        x=[change.value for change in changes],
        low=[change.low for change in changes],
        high=[change.high for change in changes],
        single=[[] for _ in rows],
    )


def _models(record: Evaluation) -> Table:
    rows = []
    for role, facts in (("candidate", record.models.candidate), ("baseline", record.models.baseline)):
        if facts is not None:
            about = f"{facts.class_}, {facts.parameters / 1e6:.1f} M parameters, {facts.dtype}"
            rows.append([role, f"{facts.name} ({about}), evaluated in {facts.seconds:.0f} s"])
    rows += [[row.name, ", ".join(row.tasks)] for row in record.groups]
    return "Models and groups", ["model or group", "details"], rows

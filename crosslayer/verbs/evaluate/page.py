"""The page of an evaluation, from its record alone: tables and figures of differences by task."""

from collections.abc import Sequence

from crosslayer.cache.running import CacheOptions
from crosslayer.judge.page import by_verdict, listing, models_table
from crosslayer.judge.report import Row
from crosslayer.judge.tasks.harness import LOCAL
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import Dots, Panel
from crosslayer.stats.estimate import band
from crosslayer.verbs.evaluate.result import Evaluation

DETAILS = {"items": "items", "only_candidate": "only\ncandidate", "only_original": "only\noriginal"}
NEEDED = {"items_for_a_point": "items for 1 point"}


def layout(record: Evaluation) -> Page:
    """Return the page."""
    candidate, original, shots, limit = record.candidates[0], record.original, *_options(record)
    assert candidate.model is not None
    first = (record.groups or record.tasks)[:4]
    return Page(
        title=f"Evaluation of {candidate.name}" + ("" if original is None else f" against {original.name}"),
        subtitle=(
            f"lm-eval {record.lm_eval}, {limit} items of each task · few-shot examples: {shots} · "
            f"{candidate.model.dtype} on {candidate.model.device}"
        ),
        cards=[
            (_title(row), row.text(row.value), "" if row.change is None else f"{row.change_text()}: {row.verdict}")
            for row in first
        ],
        sentences=sentences(record),
        panels=_panels(record),
        tables=[models_table(record)],
        lead=tables(record),
    )


def _options(record: Evaluation) -> tuple[str, str]:
    """Return the few-shot examples, and how many items were asked, in words."""
    limit, shots = record.settings.limit, record.settings.num_fewshot
    return "task default" if shots is None else str(shots), "all" if limit is None else f"the first {limit}"


def tables(record: Evaluation) -> list[Table]:
    """Return the table of groups, if there are any, and the table of tasks."""
    if record.original is None:
        rows = [*record.groups, *record.tasks]
        return [listing("Scores", rows, {"stderr": "standard error", "items": "items", "shots": "examples"}, "task")]
    title = "Groups: means over tasks, in points"
    groups = [listing(title, record.groups, {"items": "items", "tasks": "tasks"}, "group")] if record.groups else []
    title = "Tasks: candidate − baseline in points, or candidate ÷ baseline for perplexities"
    return [*groups, listing(title, record.tasks, {**DETAILS, **NEEDED}, "task")]


def sentences(record: Evaluation) -> list[str]:
    """Return the results in sentences, groups first; gains and losses are worded alike."""
    settings = record.settings
    if record.original is None:
        written = ["Scores of one model, with lm-eval's standard errors; add --baseline for paired differences."]
    else:
        rows = (record.groups, record.tasks)
        written = [*(line for group in rows for line in by_verdict(group)), *_chance(record.tasks)]
    written += CacheOptions(settings.evict, settings.kv_bits).sentences()
    return [*written, *_evicted(record), *_caveats(record)]


def _title(row: Row) -> str:
    return f"{row.scope} {row.quantity}"


def _chance(rows: Sequence[Row]) -> list[str]:
    """Return what is not compared, and how many differences chance alone would give."""
    lone, paired = [_title(row) for row in rows if row.change is None], [row for row in rows if row.change is not None]
    written = [f"Not compared, because their scores are not means over items: {', '.join(lone)}."] if lone else []
    if len(paired) > 1:
        chance = f"{len(paired) / 20:.{1 if len(paired) < 200 else 0}f}"
        written.append(
            f"Even between equal models, {len(paired)} comparisons show up to about {chance} differences by chance."
        )
    return written


def _evicted(record: Evaluation) -> list[str]:
    """Return how many requests lost tokens to eviction."""
    if record.settings.evict is None:
        return []
    details = record.candidates[0].details
    reduced, requests = int(details["reduced"]), int(details["requests"])
    if reduced:
        return [f"Tokens were evicted in {reduced:,} of {requests:,} requests."]
    return [
        f"No tokens were evicted: all {requests:,} requests fit in the budget, so this run says nothing about eviction."
    ]


def _caveats(record: Evaluation) -> list[str]:
    limit, shots = record.settings.limit, record.settings.num_fewshot
    written = ["Scored with vLLM."] if record.settings.engine == "vllm" else []
    written += [] if limit is None else [f"Only the first {limit} items of each task were evaluated."]
    for model in record.models:
        if model.details["shortened"]:
            written.append(
                f"{model.details['shortened']:,} requests to {model.name} were truncated on the left to fit its "
                "positions."
            )
    own = {row.scope: row.details["shots"] for row in record.tasks}
    fixed = {task: number for task, number in own.items() if shots not in (None, number)}
    if fixed:
        named = ", ".join(f"{task} ({number})" for task, number in fixed.items())
        written.append(f"lm-eval fixes the number of examples of {named}: --num-fewshot {shots} does not apply.")
    return written


def _panels(record: Evaluation) -> list[Panel]:
    """Return a figure of differences in points, and one of ratios of perplexities."""
    rows = [row for row in (*record.groups, *record.tasks) if row.change is not None]
    shares = [row for row in rows if row.unit == "share"]
    ratios = [row for row in rows if row.change is not None and row.change.none == 1]
    bars = "Error bars: 95% intervals, paired by item."
    panels = []
    if shares:
        caption = f"Candidate − baseline: to the right of 0 the candidate answers more items correctly. {bars}"
        panels.append(Panel("differences", "Differences", caption, "points", "", dots=_dots(shares)))
    if ratios:
        caption = f"How far the candidate's perplexity is above the baseline's; to the left of 0 it is lower. {bars}"
        panels.append(Panel("perplexities", "Perplexities", caption, "% above", "", dots=_dots(ratios)))
    return panels


def _dots(rows: Sequence[Row]) -> Dots:
    """Return differences, or how far ratios are above 1, in percent."""
    changes = [row.change for row in rows if row.change is not None]
    changes = [change.mapped(lambda value, none=change.none: 100 * (value - none)) for change in changes]
    names = [f"{row.scope.removesuffix(LOCAL)} ({row.quantity})" for row in rows]
    return Dots(names, *band(changes), single=[[] for _ in rows])

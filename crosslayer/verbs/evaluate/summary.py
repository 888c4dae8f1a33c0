"""Summarises lm-eval's results of one or two models: rows of scores with paired differences, and groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from crosslayer.verbs.evaluate.paired import Paired, compare_groups, compare_means, compare_perplexities, compare_shares
from crosslayer.verbs.evaluate.record import Score, ScoreRow

Results = Mapping[str, Any]  # what lm-eval's simple_evaluate returns
Sample = Mapping[str, Any]
GROUP_METRICS = ("acc", "acc_norm")
CLOSE = 1e-9  # relative tolerance between lm-eval's score and the one computed from items


@dataclass(frozen=True)
class Items:
    """Values and weights (n,) of a metric; for a perplexity the values are log likelihoods.

    The score is Σ values / Σ weights, or exp(−Σ values / Σ weights) for a perplexity; in a share all values are 0 or 1.
    """

    kind: Literal["share", "mean", "perplexity"]
    values: np.ndarray
    weights: np.ndarray


def samples_of(samples: Sequence[Sample], metric: str, name: str) -> list[Sample]:
    """Return the samples of a filter that have a metric, in the order of their documents."""
    filtered = [sample for sample in samples if sample["filter"] == name and metric in sample]
    return sorted(filtered, key=lambda sample: sample["doc_id"])


def items_of(samples: Sequence[Sample], metric: str, reported: float) -> Items | None:
    """Return the items of a metric, or None if the reported score is neither their mean nor a perplexity.

    lm-eval's results do not say how a task aggregates its items, so the aggregation is taken that gives the reported
    score. An item is a number, or a pair of a log likelihood and a weight (words, bytes).
    """
    try:
        entries = np.array([sample[metric] for sample in samples], dtype=float)  # (n,) or (n, 2)
    except (TypeError, ValueError):
        return None
    if not entries.size or not np.isfinite(entries).all() or entries.shape[1:] not in ((), (2,)):
        return None
    values, weights = entries.T if entries.ndim == 2 else (entries, np.ones(len(entries)))
    mean = values.sum() / weights.sum() if weights.sum() else math.nan
    if _is_close(mean, reported):
        return Items("share" if set(values.tolist()) <= {0.0, 1.0} else "mean", values, weights)
    if reported > 0 and _is_close(-mean, math.log(reported)):
        return Items("perplexity", values, weights)
    if _is_close(-mean / math.log(2), reported):  # bits per byte
        return Items("mean", -values / math.log(2), weights)
    return None


def _is_close(value: float, reported: float) -> bool:
    return math.isclose(value, reported, rel_tol=CLOSE, abs_tol=CLOSE)


def check_same(candidate: Sequence[Sample], baseline: Sequence[Sample], task: str) -> None:
    """Refuse to pair samples with different documents or prompts."""
    for name in ("doc_id", "doc_hash", "prompt_hash"):
        if [sample[name] for sample in candidate] != [sample[name] for sample in baseline]:
            raise ValueError(f"{task}: candidate and baseline have different {name}, so their items cannot be paired")


def rows(candidate: Results, baseline: Results | None) -> tuple[ScoreRow, ...]:
    """Return a row for each task, metric and filter of lm-eval's results."""
    scored = []
    for task in candidate["samples"]:
        for key, value in candidate["results"][task].items():
            metric, _, name = key.partition(",")
            if name and not metric.endswith("_stderr") and isinstance(value, int | float):
                row = _row(candidate, baseline, task, metric, name)
                scored += [] if row is None else [row]
    return tuple(scored)


def _row(candidate: Results, baseline: Results | None, task: str, metric: str, name: str) -> ScoreRow | None:
    """Return the row of a metric and filter; None if no sample has it."""
    samples = samples_of(candidate["samples"][task], metric, name)
    if not samples:
        return None
    key = f"{metric},{name}"
    items, paired = items_of(samples, metric, candidate["results"][task][key]), None
    if baseline is not None:
        others = samples_of(baseline["samples"][task], metric, name)
        check_same(samples, others, task)
        paired = _compared(items, items_of(others, metric, baseline["results"][task][key]))
    higher_is_better = candidate["higher_is_better"].get(task, {}).get(metric) is not False  # the default is True
    if items is not None and items.kind == "perplexity":
        higher_is_better = False
    return ScoreRow(
        name=task,
        metric=metric,
        filter=name,
        higher_is_better=higher_is_better,
        kind=None if items is None else items.kind,
        items=len(samples),
        shots=candidate["n-shot"][task],
        candidate=_score(candidate, task, metric, name),
        baseline=None if baseline is None else _score(baseline, task, metric, name),
        paired=paired,
    )


def _score(results: Results, task: str, metric: str, name: str) -> Score:
    error = results["results"][task].get(f"{metric}_stderr,{name}")
    known = isinstance(error, int | float) and not math.isnan(error)
    return Score(value=results["results"][task][f"{metric},{name}"], stderr=error if known else None)


def _compared(candidate: Items | None, baseline: Items | None) -> Paired | None:
    if candidate is None or baseline is None or (candidate.weights != baseline.weights).any():
        return None
    kinds = {candidate.kind, baseline.kind}
    if kinds == {"share"}:
        return compare_shares(candidate.values, baseline.values)
    if kinds == {"perplexity"}:
        return compare_perplexities(candidate.values, baseline.values, candidate.weights)
    if "perplexity" in kinds:
        return None
    return compare_means(candidate.values, baseline.values, candidate.weights)


def group_rows(
    groups: Mapping[str, Sequence[str]], scored: Sequence[ScoreRow], candidate: Results, baseline: Results | None
) -> tuple[ScoreRow, ...]:
    """Return the means of acc, and of acc_norm if tasks have it, over the `scored` tasks of each group.

    `groups` are the groups in addition to lm-eval's own.
    """
    means = []
    for group, tasks in {**_harness_groups(candidate), **groups}.items():
        shown: set[tuple[str, ...]] = set()
        for metric in GROUP_METRICS:
            chosen = [_row_of(scored, task, metric) for task in tasks]
            members = [row for row in chosen if row is not None]
            names = tuple(row.metric for row in members)
            if len(members) == len(tasks) and names not in shown:
                shown.add(names)
                means.append(_group_row(group, metric, members, candidate, baseline))
    return tuple(means)


def _harness_groups(results: Results) -> dict[str, tuple[str, ...]]:
    """Return the tasks of lm-eval's own groups, including those of nested groups."""

    def leaves(name: str) -> list[str]:
        inner = results["group_subtasks"].get(name)
        return [name] if not inner else [leaf for child in inner for leaf in leaves(child)]

    return {name: tuple(leaves(name)) for name, inner in results["group_subtasks"].items() if inner}


def _row_of(scored: Sequence[ScoreRow], task: str, metric: str) -> ScoreRow | None:
    """Return a task's row of a metric, or of acc if it lacks that, provided that its items are right or wrong."""
    shares = {row.metric: row for row in reversed(scored) if row.name == task and row.kind == "share"}
    return shares.get(metric) or shares.get("acc")


def _group_row(
    group: str, metric: str, members: Sequence[ScoreRow], candidate: Results, baseline: Results | None
) -> ScoreRow:
    """Return the mean over tasks, weighted by items if only that gives the score that lm-eval reports of the group."""
    scores, items = np.array([row.candidate.value for row in members]), np.array([float(row.items) for row in members])
    reported = candidate.get("groups", {}).get(group, {}).get(f"{metric},none")
    reported = reported if isinstance(reported, float) else math.nan
    by_items = not _is_close(scores.mean(), reported) and _is_close(float(np.average(scores, weights=items)), reported)
    weights = items if by_items else np.ones(len(members))
    paired, of_baseline = None, None
    if baseline is not None:
        paired = compare_groups([_values(candidate, row) - _values(baseline, row) for row in members], weights)
        others = [row.baseline.value for row in members if row.baseline is not None]
        of_baseline = Score(value=float(np.average(others, weights=weights)))
    return ScoreRow(
        name=group,
        metric=metric,
        kind="share",
        items=int(items.sum()),
        tasks=tuple(row.name for row in members),
        weighting="items" if by_items else "tasks",
        candidate=Score(value=float(np.average(scores, weights=weights))),
        baseline=of_baseline,
        paired=paired,
    )


def _values(results: Results, row: ScoreRow) -> np.ndarray:
    samples = samples_of(results["samples"][row.name], row.metric, row.filter)
    return np.array([sample[row.metric] for sample in samples], dtype=float)

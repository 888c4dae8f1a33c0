"""What lm-eval's results of one or two models add up to: rows of scores with paired differences, and groups."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crosslayer.verbs.evaluate.items import CLOSE, Items, check_same, items_of, samples_of
from crosslayer.verbs.evaluate.paired import Paired, compare_groups, compare_means, compare_perplexities, compare_shares
from crosslayer.verbs.evaluate.record import GroupRow, Row, Score

Results = Mapping[str, Any]  # what lm-eval's simple_evaluate returns
GROUP_METRICS = ("acc", "acc_norm")


def rows(candidate: Results, baseline: Results | None) -> tuple[Row, ...]:
    """Return a row for each task, metric and filter of lm-eval's results.

    Raises:
        ValueError: both sides were not asked the same.

    """
    scored = []
    for task, samples in candidate["samples"].items():
        for key in _metrics(candidate, task):
            metric, _, name = key.partition(",")
            candidate_samples = samples_of(samples, metric, name)
            if not candidate_samples:
                continue
            items = items_of(candidate_samples, metric, candidate["results"][task][key])
            paired = None
            if baseline is not None:
                baseline_samples = samples_of(baseline["samples"][task], metric, name)
                check_same(candidate_samples, baseline_samples, task)
                baseline_items = items_of(baseline_samples, metric, baseline["results"][task][key])
                paired = _compared(items, baseline_items, _is_higher_better(candidate, task, metric))
            scored.append(
                Row(
                    task=task,
                    metric=metric,
                    filter=name,
                    higher_is_better=_is_higher_better(candidate, task, metric),
                    kind=None if items is None else items.kind,
                    items=len(candidate_samples),
                    shots=candidate["n-shot"][task],
                    candidate=_score(candidate, task, key),
                    baseline=None if baseline is None else _score(baseline, task, key),
                    paired=paired,
                )
            )
    return tuple(scored)


def group_rows(
    groups: Mapping[str, Sequence[str]], scored: Sequence[Row], candidate: Results, baseline: Results | None
) -> tuple[GroupRow, ...]:
    """Return the mean of acc, and that of acc_norm where tasks have it, over the tasks of each group."""
    means = []
    for group, tasks in groups.items():
        shown: set[tuple[str, ...]] = set()
        for metric in GROUP_METRICS:
            chosen = [_row_of(scored, task, metric) for task in tasks]
            parts = [row for row in chosen if row is not None]
            names = tuple(row.metric for row in parts)
            if len(parts) == len(tasks) and names not in shown:
                shown.add(names)
                means.append(_group_row(group, metric, parts, candidate, baseline))
    return tuple(means)


def harness_groups(results: Results) -> dict[str, tuple[str, ...]]:
    """Return the tasks of lm-eval's own groups, those of groups inside of them too."""

    def leaves(name: str) -> list[str]:
        inner = results["group_subtasks"].get(name)
        return [name] if not inner else [leaf for child in inner for leaf in leaves(child)]

    return {name: tuple(leaves(name)) for name, inner in results["group_subtasks"].items() if inner}


def _group_row(group: str, metric: str, parts: Sequence[Row], candidate: Results, baseline: Results | None) -> GroupRow:
    scores = np.array([row.candidate.value for row in parts])
    weights = _group_weights(candidate, group, metric, parts, scores)
    paired, of_baseline = None, None
    if baseline is not None:
        differences = [_values(candidate, row) - _values(baseline, row) for row in parts]
        paired = compare_groups(differences, weights)
        of_baseline = [row.baseline.value for row in parts if row.baseline is not None]
    return GroupRow(
        group=group,
        metric=metric,
        tasks=tuple(row.task for row in parts),
        weighting="tasks" if (weights == 1).all() else "items",
        items=sum(row.items for row in parts),
        candidate=float(np.average(scores, weights=weights)),
        baseline=None if of_baseline is None else float(np.average(of_baseline, weights=weights)),
        paired=paired,
    )


def _group_weights(candidate: Results, group: str, metric: str, parts: Sequence[Row], scores: np.ndarray) -> np.ndarray:
    """Return weights (T,) of a group's tasks: their items, where these alone give what lm-eval reports of the group."""
    equal, items = np.ones(len(parts)), np.array([float(row.items) for row in parts])
    reported = candidate.get("groups", {}).get(group, {}).get(f"{metric},none")
    if not isinstance(reported, float) or math.isclose(scores.mean(), reported, rel_tol=CLOSE):
        return equal
    return items if math.isclose(np.average(scores, weights=items), reported, rel_tol=CLOSE) else equal


def _row_of(scored: Sequence[Row], task: str, metric: str) -> Row | None:
    """Return a task's row of a metric, or else of acc, if its items are right or wrong."""
    shares = {row.metric: row for row in reversed(scored) if row.task == task and row.kind == "share"}
    return shares.get(metric) or shares.get("acc")


def _values(results: Results, row: Row) -> np.ndarray:
    samples = samples_of(results["samples"][row.task], row.metric, row.filter)
    return np.array([sample[row.metric] for sample in samples], dtype=float)


def _metrics(results: Results, task: str) -> list[str]:
    """Return the keys of a task's scores, "acc,none"; standard errors and what is no number are left out."""
    numbers = []
    for key, value in results["results"][task].items():
        if "," in key and not key.partition(",")[0].endswith("_stderr") and isinstance(value, int | float):
            numbers.append(key)
    return numbers


def _score(results: Results, task: str, key: str) -> Score:
    metric, _, name = key.partition(",")
    error = results["results"][task].get(f"{metric}_stderr,{name}")
    known = isinstance(error, int | float) and error == error
    return Score(value=results["results"][task][key], stderr=error if known else None)


def _is_higher_better(results: Results, task: str, metric: str) -> bool:
    """Return what the task says of a metric; where it says nothing, more is better."""
    return results["higher_is_better"].get(task, {}).get(metric) is not False


def _compared(candidate: Items | None, baseline: Items | None, higher_is_better: bool) -> Paired | None:
    if candidate is None or baseline is None or (candidate.weights != baseline.weights).any():
        return None
    kinds = {candidate.kind, baseline.kind}
    if kinds == {"share"}:
        return compare_shares(candidate.values, baseline.values, higher_is_better)
    if kinds == {"perplexity"}:
        return compare_perplexities(candidate.values, baseline.values, candidate.weights)
    if "perplexity" in kinds:
        return None
    return compare_means(candidate.values, baseline.values, candidate.weights, higher_is_better)

"""Summarizes lm-eval's results of one or two models: rows of scores with paired differences, and groups.

    D = Σ (x_i − y_i) / Σ w_i;   r_i = (x_i − y_i − D w_i) / mean(w);   D ± t(0.975, n − 1) · std(r) / √n

x and y are the items of the candidate and of the baseline; w is 1 except for perplexities over words or bytes. With
equal weights this is the paired t interval of a mean. It is used instead of a bootstrap because it is deterministic and
agrees with one for the hundreds of items that tasks have. `crosslayer.stats.differences` has that of shares.

Shapes: n items, T tasks. Source of the number of items: Connor (1987).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special, stats

from crosslayer.judge.report import Detail, Row
from crosslayer.stats import NORMAL, t_quantile
from crosslayer.stats.differences import FEWEST, share_difference, share_error
from crosslayer.stats.estimate import Estimate

POWER = 0.8
POINT = 0.01  # the difference for which items are counted: a point of a share, 1% of a perplexity
Results = Mapping[str, Any]  # what lm-eval's simple_evaluate returns
LoggedItem = Mapping[str, Any]  # an item with its prompt, its answers and its metrics, as lm-eval logs it
GROUP_METRICS = ("acc", "acc_norm")
# Tolerance between lm-eval's score and the one computed from items: both are sums of float64 in another order.
CLOSE = 1e-9


class Paired(NamedTuple):
    """A change over items: candidate − original, or candidate / original for perplexities, and counts that go with it.

    p is McNemar's for items that are right or wrong, Student's t otherwise, and normal for groups of tasks. The counts
    are those of items that only one of both gets right, and of items that 1 point, or 1% of a perplexity, needs with a
    power of 80%.
    """

    change: Estimate
    counts: dict[str, int] = {}


def compare_shares(candidate: np.ndarray, baseline: np.ndarray) -> Paired:
    """Return the paired difference of shares of items (n,) that are 0 or 1."""
    only_candidate = int(((candidate == 1) & (baseline == 0)).sum())
    only_original = int(((candidate == 0) & (baseline == 1)).sum())
    return Paired(
        change=share_difference(only_candidate, only_original, len(candidate), over="items"),
        counts={
            "only_candidate": only_candidate,
            "only_original": only_original,
            "items_for_a_point": items_for_shares((only_candidate + only_original) / len(candidate)),
        },
    )


def compare_perplexities(candidate: np.ndarray, baseline: np.ndarray, weights: np.ndarray) -> Paired:
    """Return the ratio of perplexities exp(−Σ x / Σ w), from the log likelihoods of items (n,)."""
    # A log perplexity is a mean over items, so it has a t interval; its ends are then those of the ratio.
    change, spread = weighted_mean(baseline - candidate, weights)
    counts = {}
    # Without a spread (two equal models) any number of items would do.
    if spread:
        quantiles = NORMAL + stats.norm.ppf(POWER)
        counts["items_for_a_point"] = max(FEWEST, math.ceil((quantiles * spread / math.log1p(POINT)) ** 2))
    return Paired(change.mapped(math.exp), counts)


def weighted_mean(differences: np.ndarray, weights: np.ndarray) -> tuple[Estimate, float | None]:
    """Return Σ d / Σ w of n items, and the standard deviation of an item; no interval and None below `FEWEST`."""
    count = len(differences)
    value = float(differences.sum() / weights.sum())
    facts: dict[str, Any] = {"value": value, "n": count, "over": "items", "how": "Student's t"}
    if count < FEWEST:
        return Estimate(**facts), None
    # Texts differ in their words or bytes: the spread is that of a ratio of sums, by its linear approximation.
    spread = float(((differences - value * weights) / weights.mean()).std(ddof=1))
    error = spread / math.sqrt(count)
    half = error * t_quantile(count - 1)
    # Where all items differ alike there is no spread: the difference is then 0, or certain.
    p = float(2 * stats.t.sf(abs(value) / error, count - 1) if error else not value)
    return Estimate(**facts, low=value - half, high=value + half, p=p), spread


def compare_groups(differences: Sequence[np.ndarray], weights: np.ndarray) -> Estimate:
    """Return the difference of means over T tasks with weights (T,), from item differences (n,) of −1 to 1 per task.

    Tasks are independent, so their variances add up.
    """
    shares = weights / weights.sum()
    errors = np.array([share_error(int((d > 0).sum()), int((d < 0).sum()), len(d)) for d in differences])
    value = float(shares @ np.array([values.mean() for values in differences]))
    error = float(np.sqrt(((shares * errors) ** 2).sum()))
    # The normal approximation does not know that no difference of shares lies beyond 1.
    return Estimate(
        value=value,
        low=max(-1.0, value - NORMAL * error),
        high=min(1.0, value + NORMAL * error),
        n=len(np.concatenate(differences)),
        over="items",
        how="Agresti-Min",
        p=float(2 * stats.norm.sf(abs(value) / error)),
    )


def items_for_shares(discordance: float) -> int:
    """Return with how many items a difference of 1 point is detected in 80% of cases, from the share that differs.

    If fewer than 1% differ, a difference of a point is impossible; the share is then taken as 1%.
    """
    share = max(discordance, POINT)
    high = special.ndtri(POWER)
    return math.ceil(((NORMAL * math.sqrt(share) + high * math.sqrt(share - POINT**2)) / POINT) ** 2)


@dataclass(frozen=True)
class Items:
    """Values and weights (n,) of a metric; for a perplexity the values are log likelihoods.

    The score is Σ values / Σ weights, or exp(−Σ values / Σ weights) for a perplexity; in a share all values are 0 or 1.
    """

    kind: Literal["share", "mean", "perplexity"]
    values: np.ndarray
    weights: np.ndarray


def samples_of(samples: Sequence[LoggedItem], metric: str, name: str) -> list[LoggedItem]:
    """Return the samples of a filter that have a metric, in the order of their documents."""
    filtered = [sample for sample in samples if sample["filter"] == name and metric in sample]
    return sorted(filtered, key=lambda sample: sample["doc_id"])


def items_of(samples: Sequence[LoggedItem], metric: str, reported: float) -> Items | None:
    """Return the items of a metric, or None if the reported score is neither their mean nor a perplexity.

    lm-eval's results do not say how a task aggregates its items, so the aggregation is taken that gives the reported
    score. An item is a number, or a pair of a log likelihood and a weight (words, bytes).
    """
    try:
        entries = np.array([sample[metric] for sample in samples], dtype=float)  # (n,) or (n, 2)
    # Items that are no numbers, such as lists of several lengths, have no mean.
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
    # Bits per byte.
    if _is_close(-mean / math.log(2), reported):
        return Items("mean", -values / math.log(2), weights)
    return None


def _is_close(value: float, reported: float) -> bool:
    return math.isclose(value, reported, rel_tol=CLOSE, abs_tol=CLOSE)


def check_same(candidate: Sequence[LoggedItem], original: Sequence[LoggedItem], task: str) -> None:
    """Refuse to pair samples with different documents or prompts."""
    for name in ("doc_id", "doc_hash", "prompt_hash"):
        if [sample[name] for sample in candidate] != [sample[name] for sample in original]:
            raise ValueError(f"{task}: candidate and original have different {name}, so their items cannot be paired")


@dataclass(frozen=True)
class Scored:
    """A metric of a task: its row, the kind of its items, and for groups their differences (n,) to the original's."""

    task: str
    metric: str
    kind: str | None
    row: Row
    differences: np.ndarray | None


def task_rows(candidate: str, results: Results, original: Results | None) -> list[Scored]:
    """Return a row for each task, metric and filter of lm-eval's results of a candidate and, if given, the original."""
    scored = []
    for task in results["samples"]:
        for key, value in results["results"][task].items():
            metric, _, name = key.partition(",")
            if name and not metric.endswith("_stderr") and isinstance(value, int | float):
                of_metric = _scored(candidate, results, original, task, metric, name)
                scored += [] if of_metric is None else [of_metric]
    return scored


def _scored(
    candidate: str, results: Results, original: Results | None, task: str, metric: str, name: str
) -> Scored | None:
    """Return the row of a metric and filter; None if no sample has it."""
    key = f"{metric},{name}"
    samples = samples_of(results["samples"][task], metric, name)
    if not samples:
        return None
    items = items_of(samples, metric, results["results"][task][key])
    kind = None if items is None else items.kind
    details: dict[str, Detail] = {"items": len(samples), "shots": results["n-shot"][task]}
    for prefix, scores in (("", results), ("original_", original)):
        # lm-eval writes N/A, or NaN, for a metric of which it has no standard error.
        error = None if scores is None else scores["results"][task].get(f"{metric}_stderr,{name}")
        if isinstance(error, int | float) and not math.isnan(error):
            details[f"{prefix}stderr"] = error

    paired, differences = None, None
    if original is not None:
        originals = samples_of(original["samples"][task], metric, name)
        check_same(samples, originals, task)
        paired = _compared(items, items_of(originals, metric, original["results"][task][key]))
        if items is not None and kind == "share" and metric in GROUP_METRICS:
            differences = items.values - np.array([sample[metric] for sample in originals], dtype=float)
    # True is lm-eval's default, so a task may leave it out.
    higher_is_better = results["higher_is_better"].get(task, {}).get(metric) is not False
    row = Row(
        quantity=metric if name == "none" else f"{metric} ({name})",
        unit="share" if kind == "share" else "",
        candidate=candidate,
        scope=task,
        original=None if original is None else original["results"][task][key],
        value=results["results"][task][key],
        change=None if paired is None else paired.change,
        better="higher" if higher_is_better and kind != "perplexity" else "lower",
        details={**details, **({} if paired is None else paired.counts)},
    )
    return Scored(task, metric, kind, row, differences)


def _compared(candidate: Items | None, original: Items | None) -> Paired | None:
    """Return the paired change of two models' items; None if they cannot be paired item by item."""
    # Items of other weights (words, bytes) cannot be subtracted one by one.
    if candidate is None or original is None or (candidate.weights != original.weights).any():
        return None
    kinds = {candidate.kind, original.kind}
    if kinds == {"share"}:
        return compare_shares(candidate.values, original.values)
    if kinds == {"perplexity"}:
        return compare_perplexities(candidate.values, original.values, candidate.weights)
    if "perplexity" in kinds:
        return None
    return Paired(weighted_mean(candidate.values - original.values, candidate.weights)[0])


def group_rows(groups: Mapping[str, Sequence[str]], scored: Sequence[Scored], results: Results) -> list[Row]:
    """Return the means of acc, and of acc_norm if tasks have it, over the `scored` tasks of each group.

    `groups` are the groups in addition to lm-eval's own. A group's row names its tasks in its details.
    """
    # lm-eval's own groups, with the tasks of the groups in them.
    members_of: dict[str, Sequence[str]] = {}
    for group, inner in results["group_subtasks"].items():
        left, tasks = [*(inner or ())], []
        while left:
            name = left.pop(0)
            children = results["group_subtasks"].get(name)
            left[:0] = children or ()
            tasks += [] if children else [name]
        if tasks:
            members_of[group] = tasks

    means = []
    for group, tasks in {**members_of, **groups}.items():
        shown: set[tuple[str, ...]] = set()
        for metric in GROUP_METRICS:
            members = []
            # By this metric, or by acc if a task lacks that, provided that its items are right or wrong.
            for task in tasks:
                shares = {one.metric: one for one in reversed(scored) if one.task == task and one.kind == "share"}
                chosen = shares.get(metric) or shares.get("acc")
                members += [] if chosen is None else [chosen]
            # A mean without some tasks is not that of the group, and the same metrics would give the same row again.
            metrics = tuple(member.metric for member in members)
            if len(members) == len(tasks) and metrics not in shown:
                shown.add(metrics)
                means.append(_group_row(group, metric, members, results))
    return means


def _group_row(group: str, metric: str, members: Sequence[Scored], results: Results) -> Row:
    """Return the mean over tasks, weighted by items if only that gives the score that lm-eval reports of the group."""
    scores = np.array([member.row.value for member in members], dtype=float)
    items = np.array([member.row.details["items"] for member in members], dtype=float)
    # Whether a group counts items (MMLU) or tasks is not in the results, but the score that lm-eval reports tells.
    reported = results.get("groups", {}).get(group, {}).get(f"{metric},none")
    reported = reported if isinstance(reported, float) else math.nan
    by_items = not _is_close(scores.mean(), reported) and _is_close(float(np.average(scores, weights=items)), reported)
    weights = items if by_items else np.ones(len(members))
    change, of_original = None, None
    differences = [member.differences for member in members if member.differences is not None]
    if differences:  # there is an original
        change = compare_groups(differences, weights)
        originals = np.array([member.row.original for member in members], dtype=float)
        of_original = float(np.average(originals, weights=weights))
    return Row(
        quantity=metric,
        unit="share",
        candidate=members[0].row.candidate,
        scope=group,
        original=of_original,
        value=float(np.average(scores, weights=weights)),
        change=change,
        better="higher",
        details={
            "items": int(items.sum()),
            "tasks": ", ".join(member.task for member in members),
            "weighting": "items" if by_items else "tasks",
        },
    )

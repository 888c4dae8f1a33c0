"""Rows of a report, from what a judge has measured."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from crosslayer.judge.clock import Run
from crosslayer.judge.damage import Losses
from crosslayer.judge.hidden import Sample
from crosslayer.judge.report import ALL, Against, Row
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.stats.differences import share_difference
from crosslayer.stats.estimate import Estimate, new_domain
from crosslayer.stats.times import compare_times, paired_ratio

NEW = "a new domain"  # the scope of a prediction
RETRIEVAL = "retrieval"


class Compared(NamedTuple):
    """A quantity of windows: of what the candidate is compared with, of the candidate, and the change."""

    original: float
    value: float
    change: Estimate


def count_ratio(value: float | None, original: float | None) -> Estimate | None:
    """Return the ratio of two counts, which has no spread; None if one of them is 0 or unknown."""
    # No tensor was found in a cache that holds 0 bytes, so a ratio would claim what nobody saw.
    if not value or not original:
        return None
    ratio = value / original
    return Estimate(value=ratio, low=ratio, high=ratio, n=1, over="cache", how="counted", none=1.0)


def bytes_row(quantity: str, value: float | None, original: float | None, **facts: Any) -> Row:
    """Return the row of a number of bytes, with its ratio to the original's."""
    change = count_ratio(value, original)
    return Row(quantity=quantity, unit="bytes", value=value, original=original, change=change, **facts)


def time_row(quantity: str, seconds: Sequence[float], original: Sequence[float], **facts: Any) -> Row:
    """Return the median seconds of pairs of runs, and their ratio.

    The detail `spread` says how far apart the quartiles of equal runs are, as a fraction.
    """
    times = compare_times(seconds, original)
    medians: dict[str, Any] = {"original": times.baseline.median, "value": times.candidate.median}
    spread = max(times.candidate.spread, times.baseline.spread)
    return Row(quantity=quantity, unit="s", change=times.change, details={"spread": spread}, **medians, **facts)


def peak_row(pairs: Sequence[tuple[Run, Run]], **facts: Any) -> Row:
    """Return the median peak memory of pairs of runs (candidate, original), and their ratio.

    One run of each model says little: of two equal commands, one gave a ratio of 1.31 and one of 1.69.
    """
    peaks = [[run.peak.bytes for run in side] for side in zip(*pairs, strict=True)]
    reasons = [run.peak.reason for pair in pairs for run in pair if run.peak.reason]
    # A peak of 0, of a run that fit into memory which the process already held, has no ratio either.
    if reasons or not all(all(side) for side in peaks):
        details: dict[str, Any] = {"reason": reasons[0]} if reasons else {}
        return Row(quantity="peak memory", unit="bytes", details=details, **facts)
    candidate, original = (np.array(side, dtype=float) for side in peaks)
    medians: dict[str, Any] = {"value": float(np.median(candidate)), "original": float(np.median(original))}
    change = paired_ratio(candidate.tolist(), original.tolist())
    return Row(quantity="peak memory", unit="bytes", change=change, **medians, **facts)


def cache_rows(candidate_run: Run, original_run: Run, /, **facts: Any) -> list[Row]:
    """Return the bytes of the dynamic cache and, if both runs have one, of the static cache, in 16 bits."""
    rows = []
    sides = [
        ("bytes", candidate_run.dynamic, original_run.dynamic),
        ("bytes, static cache", candidate_run.static, original_run.static),
    ]
    for quantity, held, original in sides:
        if held is not None and original is not None:
            details = {"stored": held.allocated, "original_stored": original.allocated}
            rows.append(bytes_row(quantity, held.sixteen, original.sixteen, details=details, **facts))
    return rows


def time_rows(pairs: Sequence[tuple[Run, Run]], measures: Sequence[str], **facts: Any) -> list[Row]:
    """Return the row of each measure over pairs of runs (candidate, original)."""
    rows = []
    for measure in measures:
        seconds, original = ([run.seconds[measure] for run in side] for side in zip(*pairs, strict=True))
        rows.append(time_row(measure, seconds, original, **facts))
    return rows


def perplexity(losses: Losses, other: Losses | None = None, seed: int = 0) -> Compared:
    """Return the perplexities, and their ratio."""
    before = losses.means["before"] if other is None else other.means["after"]
    after = losses.means["after"]
    ratio = Bootstrap(losses.documents, seed).ratio(after - before)
    return Compared(float(np.exp(before.mean())), float(np.exp(after.mean())), ratio)


def mean_change(name: str, losses: Losses, other: Losses | None = None, seed: int = 0) -> Compared:
    """Return the mean of what is 0 for the original (`damage.OF_TOKENS`), or its difference to that of other losses."""
    values, bootstrap = losses.means[name], Bootstrap(losses.documents, seed)
    if other is not None:
        before = other.means[name]
        return Compared(float(before.mean()), float(values.mean()), bootstrap.mean(values - before))
    mean = bootstrap.mean(values)
    # A KL or a share is at least 0, but the spread of draws by Student's t may reach below. A mean that rounding has
    # put below 0 stays within its interval.
    if mean.low is not None:
        mean = mean.model_copy(update={"low": max(mean.low, min(mean.value, 0.0))})
    return Compared(0.0, mean.value, mean)


kl = partial(mean_change, "kl")

# What every report says of the damage on windows of text, by name, with its unit. A new quantity needs an entry here,
# and what it measures at a token in `damage.compare`.
WINDOW_QUANTITIES: dict[str, tuple[str, Callable[[Losses, Losses | None, int], Compared]]] = {
    "KL": ("nats/token", kl),
    "perplexity": ("", perplexity),
    # The share of tokens after which the most likely next token is not the original's.
    "changed tokens": ("share", partial(mean_change, "changed")),
}


def window_rows(
    candidate: str, losses: Losses, seed: int = 0, other: Losses | None = None, against: Against = Against.ORIGINAL
) -> list[Row]:
    """Return what a candidate costs on all windows and on those of each domain, and the KL that a new domain may have.

    `other`: those on the same windows of what the candidate is compared with, if that is not the original; `against`
    names it. `seed` is that of the bootstrap.
    """
    rows = []
    domains = tuple(dict.fromkeys(losses.domains))
    for name, (unit, compared) in WINDOW_QUANTITIES.items():
        facts: dict[str, Any] = {"quantity": name, "unit": unit, "candidate": candidate}
        means = []
        for scope in (ALL, *domains):
            before = None if other is None else other.for_domain(scope)
            of_scope = compared(losses.for_domain(scope), before, seed)
            rows.append(Row(scope=scope, against=against, **of_scope._asdict(), **facts))
            means += [of_scope.value] if scope != ALL else []
        # Intervals over windows hold for these texts alone. This one says what text of another kind may cost.
        if name == "KL" and other is None and len(means) > 1:
            rows.append(Row(scope=NEW, change=new_domain(means, least=0.0), **facts))
    return rows


def retrieval_rows(
    candidate: str, samples: Sequence[Sample], found: Sequence[bool], original: Sequence[bool] | None = None
) -> list[Row]:
    """Return the share of hidden numbers that a candidate finds, of all and at each length, with the original's.

    `found` (N,) says of each sample whether the candidate finds its number; `original` the same of the original. No
    rows without samples.
    """
    if not samples:
        return []
    rows = []
    for length in (None, *dict.fromkeys(sample.length for sample in samples)):
        asked = [index for index, sample in enumerate(samples) if length in (None, sample.length)]
        retrieved = [found[index] for index in asked]
        before = None if original is None else [original[index] for index in asked]
        rows.append(
            Row(
                quantity=RETRIEVAL,
                unit="share",
                candidate=candidate,
                scope=ALL if length is None else f"{length} tokens",
                original=None if before is None else sum(before) / len(before),
                value=sum(retrieved) / len(retrieved),
                change=None if before is None else retrieval_change(retrieved, before),
                better="higher",
                details={"samples": len(retrieved)},
            )
        )
    return rows


def retrieval_change(model: Sequence[bool], original: Sequence[bool]) -> Estimate:
    """Return the share of numbers that a model finds less that of its original, paired by question."""
    pairs = list(zip(model, original, strict=True))
    return share_difference(pairs.count((True, False)), pairs.count((False, True)), len(pairs))

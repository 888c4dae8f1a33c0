"""Rows of a report, from what a judge has measured."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crosslayer.judge.clock import Run
from crosslayer.judge.damage import Losses, kl_estimate, ratio_estimate
from crosslayer.judge.report import Row
from crosslayer.judge.retrieval import retrieval_change
from crosslayer.stats.estimate import Estimate, new_domain
from crosslayer.stats.times import compare_times, paired_ratio

NEW = "a new domain"  # the scope of a prediction


def count_ratio(value: float | None, original: float | None) -> Estimate | None:
    """Return the ratio of two counts, which has no spread; None if one of them is 0 or unknown."""
    if not value or not original:
        return None
    ratio = value / original
    return Estimate(value=ratio, low=ratio, high=ratio, n=1, over="cache", how="counted", none=1.0)


def bytes_row(quantity: str, value: float | None, original: float | None, **facts: Any) -> Row:
    """Return the row of a number of bytes, with its ratio to the original's."""
    change = count_ratio(value, original)
    return Row(quantity=quantity, unit="bytes", value=value, original=original, change=change, **facts)


def time_row(quantity: str, own: Sequence[float], original: Sequence[float], **facts: Any) -> Row:
    """Return the median seconds of pairs of runs, and their ratio.

    The detail `spread` says how far apart the quartiles of equal runs are, as a fraction.
    """
    found = compare_times(own, original)
    medians: dict[str, Any] = {"original": found.baseline.median, "value": found.candidate.median}
    spread = max(found.candidate.spread, found.baseline.spread)
    return Row(quantity=quantity, unit="s", change=found.change, details={"spread": spread}, **medians, **facts)


def peak_row(pairs: Sequence[tuple[Run, Run]], **facts: Any) -> Row:
    """Return the median peak memory of pairs of runs (candidate, original), and their ratio.

    One run of each model says little: of two equal commands, one gave a ratio of 1.31 and one of 1.69.
    """
    peaks = [[run.peak.bytes for run in side] for side in zip(*pairs, strict=True)]
    reasons = [run.peak.reason for pair in pairs for run in pair if run.peak.reason]
    if reasons or not all(all(side) for side in peaks):
        details: dict[str, Any] = {"reason": reasons[0]} if reasons else {}
        return Row(quantity="peak memory", unit="bytes", details=details, **facts)
    own, other = (np.array(side, dtype=float) for side in peaks)
    medians: dict[str, Any] = {"value": float(np.median(own)), "original": float(np.median(other))}
    return Row(
        quantity="peak memory", unit="bytes", change=paired_ratio(own.tolist(), other.tolist()), **medians, **facts
    )


def cache_rows(own_run: Run, original_run: Run, /, **facts: Any) -> list[Row]:
    """Return the bytes of the dynamic cache and, if both runs have one, of the static cache, in 16 bits."""
    rows = []
    sides = [
        ("bytes", own_run.dynamic, original_run.dynamic),
        ("bytes, static cache", own_run.static, original_run.static),
    ]
    for quantity, own, other in sides:
        if own is not None and other is not None:
            details = {"stored": own.allocated, "original_stored": other.allocated}
            rows.append(bytes_row(quantity, own.sixteen, other.sixteen, details=details, **facts))
    return rows


def time_rows(pairs: Sequence[tuple[Run, Run]], measures: Sequence[str], **facts: Any) -> list[Row]:
    """Return the row of each measure over pairs of runs (candidate, original)."""
    rows = []
    for measure in measures:
        own, other = ([run.seconds[measure] for run in side] for side in zip(*pairs, strict=True))
        rows.append(time_row(measure, own, other, **facts))
    return rows


def kl_rows(candidate: str, found: Losses, seed: int = 0) -> list[Row]:
    """Return KL and the ratio of perplexities, of all windows and by domain, and the KL that a new domain may have."""
    rows = damage_rows(candidate, found.kl, found.domains, found.documents, seed)
    for scope in ("all", *dict.fromkeys(found.domains)):
        losses = found if scope == "all" else found.for_domain(scope)
        before, after = float(np.exp(losses.before.mean())), float(np.exp(losses.after.mean()))
        facts: dict[str, Any] = {"candidate": candidate, "scope": scope, "change": ratio_estimate(losses, seed)}
        rows.append(Row(quantity="perplexity", unit="", original=before, value=after, **facts))
    return rows


def damage_rows(
    candidate: str, kl: np.ndarray, domains: Sequence[str], documents: Sequence[int], seed: int = 0
) -> list[Row]:
    """Return the KL of N windows, of all and by domain, and that which a new domain may have.

    `kl` (N,) is in nats per token; `domains` may be empty for a single one; `seed` is that of the bootstrap.
    """
    rows, means = [], []
    for scope in ("all", *dict.fromkeys(domains)):
        picked = np.array([scope in ("all", domain) for domain in domains or [""] * len(kl)])
        mean = kl_estimate(kl[picked], np.array(documents)[picked].tolist(), seed)
        facts: dict[str, Any] = {"candidate": candidate, "scope": scope, "change": mean}
        rows.append(Row(quantity="KL", unit="nats/token", original=0.0, value=mean.value, **facts))
        means += [mean.value] if scope != "all" else []
    if len(means) > 1:
        estimate = new_domain(means, least=0.0)
        rows.append(Row(quantity="KL", unit="nats/token", candidate=candidate, scope=NEW, change=estimate))
    return rows


def retrieval_row(
    candidate: str, scope: str, found: Sequence[bool], original: Sequence[bool] | None = None, **details: int
) -> Row:
    """Return the share of hidden numbers that a candidate finds, with the original's if there is one."""
    return Row(
        quantity="retrieval",
        unit="share",
        candidate=candidate,
        scope=scope,
        original=None if original is None else sum(original) / len(original),
        value=sum(found) / len(found),
        change=None if original is None else retrieval_change(found, original),
        better="higher",
        details=dict(details),
    )

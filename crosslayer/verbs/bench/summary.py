"""Summaries over repeats: medians, paired ratios, and how far a prediction is off and why."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosslayer.stats.ratios import paired_ratio, verdict
from crosslayer.verbs.bench.costs import Load, Operators, Prediction, Rates, Structure, predict
from crosslayer.verbs.bench.record import (
    MEASURES,
    ROLES,
    Both,
    Bytes,
    CacheBytes,
    Comparison,
    Note,
    PeakMemory,
    Role,
    Row,
    Timing,
    UnsteadyRate,
)

FAR = 0.2  # a prediction that is further off is explained
Seconds = Mapping[Role, Sequence[float]]  # of each repeat


@dataclass(frozen=True)
class WarmUp:
    """Counts from a model's first run: bytes of peak memory and of both caches, operators of a decoding step."""

    peak: int | None
    peak_reason: str | None
    dynamic: tuple[int, int]  # allocated, and in 16 bits
    static: tuple[int, int]
    operators: Operators


def middle(rates: Sequence[Rates]) -> Rates:
    """Return the median of each rate over repeats."""
    medians = {name: statistics.median(rate.by_name()[name] for rate in rates) for name in rates[0].by_name()}
    return Rates(**medians, asynchronous=rates[0].asynchronous)


def unsteadiest(rates: Sequence[Rates]) -> UnsteadyRate:
    """Return the rate whose quartiles are farthest apart."""
    spreads = {}
    for name in rates[0].by_name():
        low, high = np.quantile([rate.by_name()[name] for rate in rates], [0.25, 0.75])
        spreads[name] = float(high / low - 1)
    worst = max(spreads, key=lambda name: spreads[name])
    return UnsteadyRate(rate=worst, spread=spreads[worst])


def row(
    load: Load,
    times: Mapping[str, Seconds],
    warm_ups: Mapping[Role, WarmUp],
    structures: Mapping[Role, Structure],
    rates: Sequence[Rates],
) -> Row:
    """Return the row of a configuration from the times of both models, their warm-up and the rates of every repeat.

    `structures` and `rates` are empty without a prediction.
    """
    predictions: dict[Role, dict[str, Prediction]] = {}
    usual, unsteady = (middle(rates), unsteadiest(rates)) if rates else (None, None)
    cached, reads = None, None
    if usual is not None:
        for role in ROLES:
            predictions[role] = predict(structures[role], usual, load, warm_ups[role].operators)
    if structures:
        stored = [structures[role].cache_bytes(load.batch, load.total) for role in ROLES]
        if not structures["candidate"].decoded(load.batch, load.total):
            reads = _bytes([structures[role].state_bytes(load.batch, load.total) for role in ROLES])
        cached = stored[0] / stored[1]
    measured = {}
    for name in MEASURES:
        predicted: dict[Role, Prediction] = {}
        for role, by_measure in predictions.items():
            if name in by_measure:
                predicted[role] = by_measure[name]
        measured[name] = compared(times[name], predicted, unsteady)
    candidate, baseline = (warm_ups[role] for role in ROLES)
    return Row(
        context=load.context,
        batch=load.batch,
        attention=load.attention,
        cache=CacheBytes(
            dynamic=_bytes(*zip(candidate.dynamic, baseline.dynamic, strict=True), predicted=cached),
            static=_bytes(*zip(candidate.static, baseline.static, strict=True), predicted=cached),
        ),
        reads=reads,
        **measured,
        peak_memory=PeakMemory(
            candidate=candidate.peak, baseline=baseline.peak, reason=candidate.peak_reason or baseline.peak_reason
        ),
        rates=usual,
        unsteadiest_rate=unsteady,
        operators=Both(candidate=candidate.operators, baseline=baseline.operators),
    )


def _bytes(counts: Sequence[int], in_16_bits: Sequence[int] | None = None, predicted: float | None = None) -> Bytes:
    ratio, share = (one[0] / one[1] for one in (counts, in_16_bits or counts))
    return Bytes(candidate=counts[0], baseline=counts[1], ratio=ratio, share=share, predicted_ratio=predicted)


def compared(
    times: Seconds, predicted: Mapping[Role, Prediction] | None = None, unsteady: UnsteadyRate | None = None
) -> Comparison:
    """Return medians, quartiles and ratio of both models, with notes on predictions that are far off."""
    ratio, interval = paired_ratio(times["candidate"], times["baseline"])
    timings = {}
    for role in ROLES:
        low, median, high = (float(value) for value in np.quantile(times[role], [0.25, 0.5, 0.75]))
        timings[role] = Timing(median=median, quartiles=(low, high), predicted=(predicted or {}).get(role))
    judgement = verdict(interval, len(times["candidate"]))
    comparison = Comparison(**timings, ratio=ratio, interval=interval, verdict=judgement)
    if not predicted or len(predicted) < len(ROLES) or unsteady is None:
        return comparison
    expected = predicted["candidate"].seconds / predicted["baseline"].seconds
    pairs = [("the ratio", ratio, expected)]
    pairs += [(f"the {role}'s time", timings[role].median, predicted[role].seconds) for role in ROLES]
    notes = [explain(*pair, comparison, unsteady) for pair in pairs]
    far = tuple(note for note in notes if note is not None)
    return comparison.model_copy(update={"predicted_ratio": expected, "notes": far})


def explain(
    what: str, measured: float, predicted: float, comparison: Comparison, unsteady: UnsteadyRate
) -> Note | None:
    """Return by how much a prediction is off and a likely cause, or None if it is within 20%."""
    off = measured / predicted - 1
    if abs(off) <= FAR:
        return None
    reasons = []
    if unsteady.spread > FAR:
        reasons.append(f"the machine's {unsteady.rate} rate varied by {unsteady.spread:.0%}, so it was busy otherwise")
    for role, timing in zip(ROLES, comparison.both(), strict=True):
        if timing.spread > FAR:
            reasons.append(f"the {role}'s repeats vary by {timing.spread:.0%}")
        share = 0.0 if timing.predicted is None else timing.predicted.operator_share
        if share > 0.5:
            reasons.append(f"{share:.0%} of the {role}'s prediction is the fixed cost per operator, a rough estimate")
    why = "; ".join(reasons) or "this run shows no cause"
    direction = "above" if off > 0 else "below"
    return Note(off=off, words=f"{what} is {abs(off):.0%} {direction} the prediction: {why}")

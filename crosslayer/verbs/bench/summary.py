"""What repeats of a setting add up to: medians, paired ratios, and how far a prediction is off, and why."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosslayer.stats.ratios import paired_ratio, verdict
from crosslayer.verbs.bench.costs import Load, Operators, Prediction, Rates, Structure, predict
from crosslayer.verbs.bench.record import (
    MEASURES,
    SIDES,
    Both,
    Bytes,
    CacheBytes,
    Comparison,
    Note,
    PeakMemory,
    Row,
    Side,
    Timing,
    UnsteadyRate,
)

FAR = 0.2  # a prediction that is further off is explained
Seconds = Mapping[Side, Sequence[float]]  # of each repeat


@dataclass(frozen=True)
class WarmUp:
    """What the first run of a side tells: bytes of peak memory and of both caches, operators of a decoding step."""

    peak: int | None
    peak_reason: str | None
    dynamic_bytes: int
    static_bytes: int
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
    warm_ups: Mapping[Side, WarmUp],
    structures: Mapping[Side, Structure],
    rates: Sequence[Rates],
    no_eager: str | None,
) -> Row:
    """Return the row of a setting from the times of both sides, their warm-up and the rates of every repeat.

    Structures and rates are missing where there is no prediction, times of eager attention where `no_eager` says why.
    """
    predictions: dict[Side, dict[str, Prediction]] = {}
    usual, unsteady = (middle(rates), unsteadiest(rates)) if rates else (None, None)
    cached, reads = None, None
    if usual is not None:
        for side in SIDES:
            predictions[side] = predict(structures[side], usual, load, warm_ups[side].operators)
    if structures:
        stored = [structures[side].cache_bytes(load.batch, load.total) for side in SIDES]
        reads = _bytes([structures[side].state_bytes(load.batch, load.total) for side in SIDES])
        cached = stored[0] / stored[1]
    measured = {}
    for name in MEASURES:
        measured[name] = compared(times[name], {side: predictions[side][name] for side in predictions}, unsteady)
    candidate, baseline = (warm_ups[side] for side in SIDES)
    return Row(
        context=load.context,
        batch=load.batch,
        cache=CacheBytes(
            dynamic=_bytes([candidate.dynamic_bytes, baseline.dynamic_bytes], cached),
            static=_bytes([candidate.static_bytes, baseline.static_bytes], cached),
        ),
        reads=reads,
        **measured,
        peak_memory=PeakMemory(
            candidate=candidate.peak, baseline=baseline.peak, reason=candidate.peak_reason or baseline.peak_reason
        ),
        rates=usual,
        unsteadiest_rate=unsteady,
        operators=Both(candidate=candidate.operators, baseline=baseline.operators),
        eager=compared(times["eager"]) if no_eager is None else None,
        no_eager=no_eager,
    )


def _bytes(sides: Sequence[int], predicted: float | None = None) -> Bytes:
    return Bytes(candidate=sides[0], baseline=sides[1], ratio=sides[0] / sides[1], predicted_ratio=predicted)


def compared(
    times: Seconds, predicted: Mapping[Side, Prediction] | None = None, unsteady: UnsteadyRate | None = None
) -> Comparison:
    """Return medians and quartiles of both sides and their ratio; beside predictions, with notes on what is far off."""
    ratio, interval = paired_ratio(times["candidate"], times["baseline"])
    timings = {}
    for side in SIDES:
        low, median, high = (float(value) for value in np.quantile(times[side], [0.25, 0.5, 0.75]))
        timings[side] = Timing(median=median, quartiles=(low, high), predicted=(predicted or {}).get(side))
    verdict_seen = verdict(interval, len(times["candidate"]))
    comparison = Comparison(**timings, ratio=ratio, interval=interval, verdict=verdict_seen)
    if not predicted or unsteady is None:
        return comparison
    expected = predicted["candidate"].seconds / predicted["baseline"].seconds
    pairs = [("the ratio", ratio, expected)]
    pairs += [(f"the {side}'s time", timings[side].median, predicted[side].seconds) for side in SIDES]
    notes = [explain(*pair, comparison, unsteady) for pair in pairs]
    seen = tuple(note for note in notes if note is not None)
    return comparison.model_copy(update={"predicted_ratio": expected, "notes": seen})


def explain(
    what: str, measured: float, predicted: float, comparison: Comparison, unsteady: UnsteadyRate
) -> Note | None:
    """Return by how much a prediction is off and what was seen beside it, or None where it is within 20 %."""
    off = measured / predicted - 1
    if abs(off) <= FAR:
        return None
    reasons = []
    if unsteady.spread > FAR:
        reasons.append(f"the machine's rate of {unsteady.rate} varied by {unsteady.spread:.0%}: other work ran on it")
    for side, timing in zip(SIDES, comparison.sides(), strict=True):
        if timing.spread > FAR:
            reasons.append(f"repeats of the {side} spread by {timing.spread:.0%}")
        share = 0.0 if timing.predicted is None else timing.predicted.operator_share
        if share > 0.5:
            reasons.append(f"{share:.0%} of the {side}'s prediction is the fixed cost of operators, a rough term")
    why = "; ".join(reasons) or "no cause was seen in this run"
    return Note(off=off, words=f"{what} is {off:+.0%} off the prediction: {why}")

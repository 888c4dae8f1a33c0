"""What repeats of a setting add up to: medians, paired ratios, and how far a prediction is off, and why."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosslayer.stats.ratios import paired_ratio, verdict
from crosslayer.verbs.bench.costs import Structure
from crosslayer.verbs.bench.prediction import Load, Operators, Predictions, Rates, predict
from crosslayer.verbs.bench.record import (
    MEASURES,
    SIDES,
    Both,
    ByCache,
    CacheBytes,
    Comparison,
    Note,
    PeakMemory,
    ReadBytes,
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
    medians = {name: statistics.median(values) for name, values in _by_name(rates).items()}
    return Rates(**medians, asynchronous=rates[0].asynchronous)


def unsteadiest(rates: Sequence[Rates]) -> UnsteadyRate:
    """Return the rate whose quartiles are farthest apart."""
    spreads = {}
    for name, values in _by_name(rates).items():
        low, high = np.quantile(values, [0.25, 0.75])
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
    predictions: dict[Side, Predictions] = {}
    if rates:
        for side in SIDES:
            predictions[side] = predict(structures[side], middle(rates), load, warm_ups[side].operators)
    unsteady = unsteadiest(rates) if rates else None
    ttft, dynamic, static = (_comparison(name, times[name], predictions, unsteady) for name in MEASURES)
    return Row(
        context=load.context,
        batch=load.batch,
        cache=_cache(load, warm_ups, structures),
        reads=_reads(load, structures),
        ttft=ttft,
        tpot_dynamic=dynamic,
        tpot_static=static,
        tokens_per_second=ByCache(dynamic=_speed(load, dynamic), static=_speed(load, static)),
        peak_memory=_peak(warm_ups),
        rates=middle(rates) if rates else None,
        unsteadiest_rate=unsteady,
        operators=Both(candidate=warm_ups["candidate"].operators, baseline=warm_ups["baseline"].operators),
        eager=compared(times["eager"]) if no_eager is None else None,
        no_eager=no_eager,
    )


def compared(times: Seconds) -> Comparison:
    """Return medians and quartiles of both sides and their ratio."""
    ratio, interval = paired_ratio(times["candidate"], times["baseline"])
    return Comparison(
        candidate=_timing(times["candidate"]),
        baseline=_timing(times["baseline"]),
        ratio=ratio,
        interval=interval,
        verdict=verdict(interval, len(times["candidate"])),
    )


def explain(
    what: str, measured: float, predicted: float, comparison: Comparison, unsteady: UnsteadyRate
) -> Note | None:
    """Return by how much a prediction is off and what was seen beside it, or None where it is within 20 %."""
    off = measured / predicted - 1
    if abs(off) <= FAR:
        return None
    reasons = []
    if unsteady.spread > FAR:
        reasons.append(
            f"the machine's own rate of {unsteady.rate} varied by {unsteady.spread:.0%}: other work ran on it"
        )
    for side, timing in comparison.named_sides():
        if timing.spread > FAR:
            reasons.append(f"repeats of the {side} spread by {timing.spread:.0%}")
        share = 0.0 if timing.predicted is None else timing.predicted.operator_share
        if share > 0.5:
            reasons.append(f"{share:.0%} of the {side}'s prediction is the fixed cost of operators, a rough term")
    why = "; ".join(reasons) or "no cause was seen in this run"
    return Note(off=off, words=f"{what} is {off:+.0%} off the prediction: {why}")


def _by_name(rates: Sequence[Rates]) -> dict[str, list[float]]:
    repeats = [rate.by_name() for rate in rates]
    return {name: [values[name] for values in repeats] for name in repeats[0]}


def _timing(seconds: Sequence[float]) -> Timing:
    low, median, high = (float(value) for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
    return Timing(median=median, quartiles=(low, high))


def _comparison(
    name: str, times: Seconds, predictions: Mapping[Side, Predictions], unsteady: UnsteadyRate | None
) -> Comparison:
    """Return a measure of both sides beside its predictions, with notes on those that are far off."""
    measured = compared(times)
    if unsteady is None:
        return measured
    predicted = {side: dict(predictions[side])[name] for side in SIDES}
    timings = {
        side: timing.model_copy(update={"predicted": predicted[side]}) for side, timing in measured.named_sides()
    }
    ratio = predicted["candidate"].seconds / predicted["baseline"].seconds
    comparison = measured.model_copy(update={**timings, "predicted_ratio": ratio})
    notes = [explain("the ratio", comparison.ratio, ratio, comparison, unsteady)]
    for side, timing in comparison.named_sides():
        notes.append(explain(f"the {side}'s time", timing.median, predicted[side].seconds, comparison, unsteady))
    return comparison.model_copy(update={"notes": tuple(note for note in notes if note is not None)})


def _cache(load: Load, warm_ups: Mapping[Side, WarmUp], structures: Mapping[Side, Structure]) -> ByCache[CacheBytes]:
    predicted = None
    if structures:
        sizes = {side: structures[side].cache_bytes(load.batch, load.total) for side in SIDES}
        predicted = sizes["candidate"] / sizes["baseline"]
    candidate, baseline = warm_ups["candidate"], warm_ups["baseline"]
    return ByCache(
        dynamic=_cache_bytes(candidate.dynamic_bytes, baseline.dynamic_bytes, predicted),
        static=_cache_bytes(candidate.static_bytes, baseline.static_bytes, predicted),
    )


def _cache_bytes(candidate: int, baseline: int, predicted: float | None) -> CacheBytes:
    return CacheBytes(candidate=candidate, baseline=baseline, ratio=candidate / baseline, predicted_ratio=predicted)


def _reads(load: Load, structures: Mapping[Side, Structure]) -> ReadBytes | None:
    if not structures:
        return None
    candidate, baseline = (structures[side].state_bytes(load.batch, load.total) for side in SIDES)
    return ReadBytes(candidate=candidate, baseline=baseline, ratio=candidate / baseline)


def _speed(load: Load, times: Comparison) -> Both[float]:
    return Both(candidate=load.batch / times.candidate.median, baseline=load.batch / times.baseline.median)


def _peak(warm_ups: Mapping[Side, WarmUp]) -> PeakMemory:
    candidate, baseline = warm_ups["candidate"], warm_ups["baseline"]
    reason = candidate.peak_reason or baseline.peak_reason
    return PeakMemory(candidate=candidate.peak, baseline=baseline.peak, reason=reason)

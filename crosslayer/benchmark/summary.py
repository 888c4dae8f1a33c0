"""What repeats add up to: medians, paired ratios with intervals, verdicts, and how far a prediction is off, and why."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from crosslayer.benchmark.costs import Load, Rates, Structure, predict
from crosslayer.benchmark.record import CLEAR

SIDES = ("candidate", "baseline")
TIMES = ("ttft", "tpot_dynamic", "tpot_static")
FAR = 0.2  # a prediction that is further off is explained
COVERAGE = 0.95  # of an interval, where there are enough pairs
RATES = tuple(field.name for field in fields(Rates) if field.name != "asynchronous")
Times = dict[str, dict[str, list[float]]]  # measure -> side -> seconds of each repeat


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float]) -> tuple[float, list[float] | None]:
    """Return the median of candidate / baseline over pairs and its interval, which covers `coverage(pairs)`.

    The ends are the k-th lowest and the k-th highest of the pairs: whatever the distribution, the median is outside of
    them as often as so many fair coins show fewer than k heads or tails. Fewer than three pairs give none.
    """
    logs = np.sort(np.log(np.asarray(candidate, dtype=float) / np.asarray(baseline, dtype=float)))
    ratio = float(np.exp(np.median(logs)))
    if len(logs) < 3:
        return ratio, None
    k = _rank(len(logs))
    return ratio, [float(np.exp(logs[k - 1])), float(np.exp(logs[-k]))]


def coverage(pairs: int) -> float:
    """Return how often an interval of `paired_ratio` holds the median: 0.9375 with 5 pairs, at least 0.95 from 6."""
    return 1 - 2 * _fewer_heads(_rank(pairs), pairs) if pairs > 1 else 0.0


def _rank(pairs: int) -> int:
    """Return the largest k whose interval covers `COVERAGE`, 1 where none does."""
    enough = [k for k in range(1, pairs // 2 + 1) if 1 - 2 * _fewer_heads(k, pairs) >= COVERAGE]
    return max(enough, default=1)


def _fewer_heads(k: int, coins: int) -> float:
    """Return how likely so many fair coins show fewer than k heads."""
    return sum(math.comb(coins, heads) for heads in range(k)) / 2**coins


def verdict(interval: Sequence[float] | None, pairs: int) -> str:
    """Return faster, slower, or undecided where the interval holds 1, is missing, or covers less than `CLEAR`."""
    if interval is None or coverage(pairs) < CLEAR or interval[0] <= 1 <= interval[1]:
        return "undecided"
    return "faster" if interval[1] < 1 else "slower"


def middle(rates: Sequence[Rates]) -> Rates:
    """Return the median of each rate over repeats."""
    measured = {name: statistics.median(getattr(one, name) for one in rates) for name in RATES}
    return Rates(**measured, asynchronous=rates[0].asynchronous)


def unsteadiest(rates: Sequence[Rates]) -> tuple[float, str]:
    """Return how far apart the quartiles of the least steady rate are (0.2: by 20 %), and its name."""
    spreads = {}
    for name in RATES:
        low, high = np.quantile([getattr(one, name) for one in rates], [0.25, 0.75])
        spreads[name] = float(high / low - 1)
    worst = max(spreads, key=lambda name: spreads[name])
    return spreads[worst], worst


def row(
    load: Load,
    times: Times,
    facts: Mapping[str, dict[str, Any]],
    shapes: Mapping[str, Structure],
    rates: Sequence[Rates],
) -> dict[str, Any]:
    """Return the record of one setting from the times of both sides, the facts of their warm-up and the rates.

    Rates are of every repeat; there are none where there is no prediction.
    """
    predicted = {}
    if rates:
        predicted = {side: predict(shapes[side], middle(rates), load, facts[side]["operators"]) for side in SIDES}
    unsteady = unsteadiest(rates) if rates else None
    found = {name: _time(name, times[name], predicted, unsteady) for name in TIMES}
    reasons = [facts[side]["peak_reason"] for side in SIDES if facts[side]["peak_reason"]]
    return {
        "context": load.context,
        "batch": load.batch,
        "cache": {kind: _cache(kind, load, facts, shapes) for kind in ("dynamic", "static")},
        "reads": _reads(load, shapes),
        **found,
        "tokens_per_second": {
            kind: {side: load.batch / found[f"tpot_{kind}"][side]["median"] for side in SIDES}
            for kind in ("dynamic", "static")
        },
        "peak_memory": {**{side: facts[side]["peak"] for side in SIDES}, "reason": reasons[0] if reasons else None},
        "rates": asdict(middle(rates)) if rates else None,
        "unsteadiest_rate": None if unsteady is None else {"rate": unsteady[1], "spread": unsteady[0]},
        "operators": {side: facts[side]["operators"] for side in SIDES},
    }


def _cache(
    kind: str, load: Load, facts: Mapping[str, dict[str, Any]], shapes: Mapping[str, Structure]
) -> dict[str, Any]:
    found = {side: facts[side][kind] for side in SIDES}
    predicted = {side: shapes[side].cache_bytes(load.batch, load.total) for side in shapes}
    return {
        **found,
        "ratio": found["candidate"] / found["baseline"],
        "predicted_ratio": predicted["candidate"] / predicted["baseline"] if predicted else None,
    }


def _reads(load: Load, shapes: Mapping[str, Structure]) -> dict[str, float] | None:
    """Return bytes of keys and values that the last decoding step reads: storing less is not reading less."""
    if not shapes:
        return None
    found = {side: shapes[side].state_bytes(load.batch, load.total) for side in SIDES}
    return {**found, "ratio": found["candidate"] / found["baseline"]}


def compared(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return medians and quartiles of both sides and their ratio."""
    ratio, interval = paired_ratio(times["candidate"], times["baseline"])
    sides = {}
    for side in SIDES:
        low, median, high = np.quantile(times[side], [0.25, 0.5, 0.75])
        sides[side] = {"median": float(median), "quartiles": [float(low), float(high)]}
    decided = verdict(interval, len(times["candidate"]))
    return {**sides, "ratio": ratio, "interval": interval, "verdict": decided}


def _time(
    name: str,
    times: Mapping[str, Sequence[float]],
    predicted: Mapping[str, dict[str, dict[str, float]]],
    unsteady: tuple[float, str] | None,
) -> dict[str, Any]:
    found = compared(times)
    if not predicted or unsteady is None:
        return {**found, "predicted_ratio": None, "notes": []}
    for side in SIDES:
        found[side]["predicted"] = predicted[side][name]
    found["predicted_ratio"] = predicted["candidate"][name]["seconds"] / predicted["baseline"][name]["seconds"]
    notes = [explain("the ratio", found["ratio"], found["predicted_ratio"], found, unsteady)]
    for side in SIDES:
        seconds = found[side]["predicted"]["seconds"]
        notes.append(explain(f"the {side}'s time", found[side]["median"], seconds, found, unsteady))
    found["notes"] = [note for note in notes if note is not None]
    return found


def explain(
    what: str, measured: float, predicted: float, found: Mapping[str, Any], unsteady: tuple[float, str]
) -> dict[str, Any] | None:
    """Return by how much a prediction is off and what was seen beside it, or None where it is within 20 %."""
    off = measured / predicted - 1
    if abs(off) <= FAR:
        return None
    reasons = []
    if unsteady[0] > FAR:
        reasons.append(f"the machine's own rate of {unsteady[1]} varied by {unsteady[0]:.0%}: other work ran on it")
    for side in SIDES:
        low, high = found[side]["quartiles"]
        if high / low - 1 > FAR:
            reasons.append(f"repeats of the {side} spread by {high / low - 1:.0%}")
        share = found[side]["predicted"]["operators"] / found[side]["predicted"]["seconds"]
        if share > 0.5:
            reasons.append(f"{share:.0%} of the {side}'s prediction is the fixed cost of operators, a rough term")
    why = "; ".join(reasons) or "no cause was seen in this run"
    return {"off": off, "words": f"{what} is {off:+.0%} off the prediction: {why}"}

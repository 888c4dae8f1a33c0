"""Summaries over repeats: medians, and ratios of paired times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosslayer.core.sixteen_bits import DTYPE
from crosslayer.stats.ratios import paired_ratio, verdict
from crosslayer.verbs.bench.memory import Load, Models, read_plans
from crosslayer.verbs.bench.record import MEASURES, ROLES, Bytes, CacheBytes, Comparison, PeakMemory, Role, Row, Timing

Seconds = Mapping[Role, Sequence[float]]  # of each repeat


@dataclass(frozen=True)
class WarmUp:
    """Bytes that a model's first run allocates: peak memory, and both caches."""

    peak: int | None
    peak_reason: str | None
    dynamic: tuple[int, int]  # allocated, and in 16 bits
    static: tuple[int, int]


def row(load: Load, times: Mapping[str, Seconds], warm_ups: Mapping[Role, WarmUp]) -> Row:
    """Return the row of a configuration from the times of both models and their warm-up."""
    candidate, baseline = (warm_ups[role] for role in ROLES)
    return Row(
        context=load.context,
        batch=load.batch,
        attention=load.attention,
        cache=CacheBytes(
            dynamic=_bytes(*zip(candidate.dynamic, baseline.dynamic, strict=True)),
            static=_bytes(*zip(candidate.static, baseline.static, strict=True)),
        ),
        **{name: compared(times[name]) for name in MEASURES},
        peak_memory=PeakMemory(
            candidate=candidate.peak, baseline=baseline.peak, reason=candidate.peak_reason or baseline.peak_reason
        ),
    )


def read_bytes(models: Models, load: Load) -> Bytes | None:
    """Return the bytes that the last step reads, by the plans; None if a model has no plan."""
    plans, in_16_bits = (read_plans(models, load, dtype) for dtype in (None, DTYPE))
    if not plans:
        return None
    return _bytes(*([plan[role].read_bytes for role in ROLES] for plan in (plans, in_16_bits)))


def _bytes(counts: Sequence[int], in_16_bits: Sequence[int]) -> Bytes:
    ratio, share = (one[0] / one[1] for one in (counts, in_16_bits))
    return Bytes(candidate=counts[0], baseline=counts[1], ratio=ratio, share=share)


def compared(times: Seconds) -> Comparison:
    """Return medians, quartiles and ratio of the times of both models."""
    ratio, interval = paired_ratio(times["candidate"], times["baseline"])
    timings = {}
    for role in ROLES:
        low, median, high = (float(value) for value in np.quantile(times[role], [0.25, 0.5, 0.75]))
        timings[role] = Timing(median=median, quartiles=(low, high))
    return Comparison(**timings, ratio=ratio, interval=interval, verdict=verdict(interval, len(times["candidate"])))

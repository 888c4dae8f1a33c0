"""The sentences and table cells of a benchmark; gains and losses are worded alike."""

from collections.abc import Iterable, Sequence
from typing import get_args

from crosslayer.eviction.running import SmallerCache
from crosslayer.output.formatting import percent
from crosslayer.stats.estimate import Verdict
from crosslayer.stats.ratios import FEWEST, coverage
from crosslayer.stats.times import SPEED
from crosslayer.verbs.bench.record import MEASURES, BenchSettings, Row, Skip
from crosslayer.verbs.bench.result import Benchmark

TITLES = {
    "ttft": "time to first token",
    "tpot_dynamic": "time per token, dynamic cache",
    "tpot_static": "time per token, static cache",
}
NOISY = 0.2  # the spread of equal runs above which the machine was busy
TOO_FEW = f"too few pairs for an interval: it needs {FEWEST} (--repeats {FEWEST})"


def sentences(record: Benchmark) -> list[str]:
    """Return what was measured over all contexts and batch sizes."""
    rows, caches = record.rows, [row.cache.dynamic for row in record.rows]
    shares = [percent(end(cache.share for cache in caches), 1) for end in (min, max)]
    reads = [row.reads.share for row in rows if row.reads is not None]
    read = f"; a decoding step reads {span(reads, 2)} as many bytes" if reads else ""
    peaks = [row.peak_memory.ratio for row in rows if row.peak_memory.ratio is not None]
    reasons = dict.fromkeys(row.peak_memory.reason for row in rows if row.peak_memory.reason is not None)
    return [
        f"KV cache: {' to '.join(dict.fromkeys(shares))} of the baseline's 16-bit cache (allocated in "
        f"{record.models.candidate.dtype}: {span([cache.ratio for cache in caches], 3)} the baseline's){read}.",
        *(_time_sentence(rows, measure) for measure in MEASURES),
        *([f"Peak memory above the weights: {span(peaks, 2)} the baseline's."] if peaks else []),
        *(f"Peak memory: {reason}." for reason in reasons),
        *_softmax_sentences(rows),
        _interval_sentence(record),
        *_noise_sentences(rows),
        *_cache_sentences(record.settings),
        *(f"Skipped: {skip.reason}." for skip in record.skipped),
    ]


def covered(pairs: int) -> str:
    """Name the interval that this number of pairs gives: 93.8% interval, or no interval."""
    return f"{percent(coverage(pairs), 1)} interval" if pairs >= FEWEST else "no interval"


def configuration(row: Row | Skip) -> str:
    """Name a configuration: context 512, batch 4, sdpa."""
    return f"context {row.context}, batch {row.batch}, {row.attention}"


def _short(row: Row) -> str:
    return f"{row.context} × {row.batch}" + (" (eager)" if row.attention == "eager" else "")


def span(ratios: Iterable[float], digits: int) -> str:
    """Format the range of ratios: 0.85x, or 0.85x to 0.97x."""
    ends = sorted(ratios)
    low, high = f"{ends[0]:.{digits}f}x", f"{ends[-1]:.{digits}f}x"
    return low if low == high else f"{low} to {high}"


def _time_sentence(rows: Sequence[Row], measure: str) -> str:
    """Return a sentence on a measure: where the candidate is faster, slower or neither."""
    clauses = []
    for verdict in get_args(Verdict):
        group = [row for row in rows if row.times()[measure].change.verdict == verdict]
        if group:
            listed = ", ".join(map(_short, group))
            everywhere = len(group) == len(rows) > 1
            where = "in every configuration" if everywhere else f"at context × batch = {listed}"
            ratios = span([row.times()[measure].change.value for row in group], 3)
            clauses.append(f"{SPEED.get(verdict, verdict)} {where} ({ratios} the baseline's)")
    return f"{TITLES[measure].capitalize()}: {'; '.join(clauses)}."


def _softmax_sentences(rows: Sequence[Row]) -> list[str]:
    """Return how much of a prompt's time softmax takes with eager attention."""
    shares = [row.softmax_share for row in rows if row.softmax_share is not None]
    if not shares:
        return []
    spans = []
    for of_role in zip(*(share.both() for share in shares), strict=True):
        ends = [percent(end(of_role), 0) for end in (min, max)]
        spans.append(" to ".join(dict.fromkeys(ends)))
    candidate, baseline = spans
    return [f"With eager attention softmax takes {candidate} of the time to first token, in the baseline {baseline}."]


def _interval_sentence(record: Benchmark) -> str:
    pairs = record.settings.repeats
    rule = "a candidate counts as faster or slower only where the interval excludes 1"
    return (
        f"Each ratio is the median of {pairs} pair{'s' if pairs > 1 else ''} of runs ({covered(pairs)}); "
        f"{TOO_FEW if pairs < FEWEST else rule}."
    )


def _noise_sentences(rows: Sequence[Row]) -> list[str]:
    """Return how far apart equal runs are, where that is more than a fifth."""
    spreads = {}
    for row in rows:
        for measure, time in row.times().items():
            where = f"{TITLES[measure]} at {_short(row)}"
            spreads[where] = max(timing.spread for timing in time.both())
    where = max(spreads, key=lambda name: spreads[name])
    if spreads[where] <= NOISY:
        return []
    return [f"Equal runs vary: {where} has quartiles {spreads[where]:.0%} apart, so the machine was probably busy."]


def _cache_sentences(settings: BenchSettings) -> list[str]:
    lines = SmallerCache(settings.evict, settings.kv_bits).sentences()
    if not lines:
        return []
    stored = [
        "the positions and attention sums that eviction stores" if settings.evict is not None else "",
        "scales" if settings.kv_bits is not None else "",
    ]
    return [
        *lines,
        "It is compared with both the dynamic and the static cache of the baseline; its size includes "
        f"{' and '.join(filter(None, stored))}.",
    ]

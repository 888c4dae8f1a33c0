"""What a bench says in sentences and cells, a gain and a loss in the same words."""

from collections.abc import Iterable, Sequence

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.output.words import percent
from crosslayer.stats.ratios import CLEAR
from crosslayer.verbs.bench.record import MEASURES, Comparison, Note, Row, Skip
from crosslayer.verbs.bench.result import Benchmark

TITLES = {
    "ttft": "time to first token",
    "tpot_dynamic": "time per token, dynamic cache",
    "tpot_static": "time per token, static cache",
}
BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
NO_INTERVAL = "Fewer than three pairs of runs give no interval, so nothing is called faster or slower."


def sentences(record: Benchmark) -> list[str]:
    """Return what was measured over all settings."""
    rows = record.rows
    reads = [row.reads.ratio for row in rows if row.reads is not None]
    read = f"; a step reads {span(reads, 2)} of its keys and values" if reads else ""
    peaks = [row.peak_memory.ratio for row in rows if row.peak_memory.ratio is not None]
    reasons = dict.fromkeys(row.peak_memory.reason for row in rows if row.peak_memory.reason is not None)
    return [
        f"KV cache: {span([row.cache.dynamic.ratio for row in rows], 3)} of the baseline's bytes{read}.",
        *(_time_words(rows, measure) for measure in MEASURES),
        *([f"Peak memory above the weights: {span(peaks, 2)} of the baseline."] if peaks else []),
        *(f"Peak memory: {reason}." for reason in reasons),
        _pairs_words(record),
        *_eviction_words(record.settings.evict),
        _prediction_words(record),
        *(f"{setting(skip)}: skipped, {skip.reason}." for skip in record.skipped),
    ]


def setting(row: Row | Skip) -> str:
    """Name a setting: context 512, batch 4."""
    return f"context {row.context}, batch {row.batch}"


def far_off(record: Benchmark) -> list[tuple[Row, str, Note]]:
    """Return row, measure and note of every prediction that is more than 20% off."""
    return [(row, measure, note) for row in record.rows for measure, time in row.times().items() for note in time.notes]


def size(count: float) -> str:
    """Write a number of bytes with three digits: 23.6 MB."""
    unit = next((unit for unit, value in BYTES.items() if count >= value), "B")
    return f"{count / BYTES.get(unit, 1):.3g} {unit}"


def duration(seconds: float) -> str:
    """Write seconds with three digits, below 1 s as milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def durations(time: Comparison) -> str:
    """Write the medians of both sides: 1.18 s / 1.32 s."""
    return " / ".join(duration(side.median) for side in time.sides())


def ratio(middle: float, interval: Sequence[float] | None) -> str:
    """Write a ratio with its interval: 0.850x (0.812-0.893)."""
    return f"{middle:.3f}x" + ("" if interval is None else f" ({interval[0]:.3f}-{interval[1]:.3f})")


def judged(time: Comparison) -> str:
    """Write a ratio of times with its interval, and what it shows."""
    return f"{ratio(time.ratio, time.interval)} {time.verdict}"


def span(ratios: Iterable[float], digits: int) -> str:
    """Write the range of ratios: 0.85x, or 0.85x to 0.97x."""
    ends = sorted(ratios)
    low, high = f"{ends[0]:.{digits}f}x", f"{ends[-1]:.{digits}f}x"
    return low if low == high else f"{low} to {high}"


def _time_words(rows: Sequence[Row], measure: str) -> str:
    """Return a sentence on a measure: in which settings the candidate is slower, faster or neither."""
    parts = []
    for verdict in ("faster", "slower", "no difference seen"):
        group = [row for row in rows if row.times()[measure].verdict == verdict]
        if group:
            listed = ", ".join(f"{row.context} × {row.batch}" for row in group)
            places = "in every setting" if len(group) == len(rows) > 1 else f"at context × batch = {listed}"
            parts.append(
                f"{verdict} {places} ({span([row.times()[measure].ratio for row in group], 3)} of the baseline)"
            )
    return f"{TITLES[measure].capitalize()}: {'; '.join(parts)}."


def _pairs_words(record: Benchmark) -> str:
    pairs, covered = record.settings.repeats, percent(record.interval_coverage, 1)
    if pairs < 3:
        return NO_INTERVAL
    words = f"A ratio is the median of {pairs} pairs of runs; its interval has pairs for its ends and covers {covered}"
    if record.interval_coverage < CLEAR:
        return f"{words}: too little to call anything faster or slower; five pairs are enough."
    return f"{words}. Faster or slower is only what has an interval without 1."


def _eviction_words(evict: str | None) -> list[str]:
    if evict is None:
        return []
    return [
        f"The candidate evicts ({evict}): {parse_eviction(evict).rule.about} stay. Its only kind of cache stands "
        "beside both of the baseline's; its bytes include what is known of its tokens."
    ]


def _prediction_words(record: Benchmark) -> str:
    if record.no_prediction is not None:
        return f"{record.no_prediction[:1].upper()}{record.no_prediction[1:]}."
    off = far_off(record)
    if not off:
        return "Every prediction is within 20% of what was measured."
    row, measure, note = max(off, key=lambda entry: abs(entry[2].off))
    predictions = 3 * len(MEASURES) * len(record.rows)  # of each time: both sides and the ratio
    place = f"{TITLES[measure]} at {row.context} × {row.batch}"
    return f"{len(off)} of {predictions} predictions are more than 20% off; the farthest, {place}: {note.words}."

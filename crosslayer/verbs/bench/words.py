"""What a bench says in sentences, a gain and a loss in the same words."""

from collections.abc import Sequence

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.stats.ratios import CLEAR
from crosslayer.verbs.bench.record import MEASURES, Note, Row, Skip
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.units import percent, span

TITLES = {
    "ttft": "time to first token",
    "tpot_dynamic": "time per token, dynamic cache",
    "tpot_static": "time per token, static cache",
}


def sentences(record: Benchmark) -> list[str]:
    """Return what was measured over all settings."""
    return [
        _cache_words(record.rows),
        *(_time_words(record.rows, measure) for measure in MEASURES),
        *_memory_words(record.rows),
        _pairs_words(record),
        *_eviction_words(record),
        *_prediction_words(record),
        *(f"{setting(skip)}: skipped, {skip.reason}." for skip in record.skipped),
    ]


def setting(row: Row | Skip) -> str:
    """Name a setting: context 512, batch 4."""
    return f"context {row.context}, batch {row.batch}"


def far_off(record: Benchmark) -> list[tuple[Row, str, Note]]:
    """Return row, measure and note of every prediction that is more than 20 % off."""
    return [(row, measure, note) for row in record.rows for measure, time in row.times().items() for note in time.notes]


def _cache_words(rows: Sequence[Row]) -> str:
    cached = span([row.cache.dynamic.ratio for row in rows], 3)
    reads = [row.reads.ratio for row in rows if row.reads is not None]
    read = f"; a step reads {span(reads, 2)} of its keys and values" if reads else ""
    return f"KV cache: {cached} of the baseline's bytes{read}."


def _time_words(rows: Sequence[Row], measure: str) -> str:
    """Return a sentence on a measure: in which settings the candidate is slower, faster or neither."""
    parts = []
    for verdict in ("faster", "slower", "undecided"):
        group = [row for row in rows if row.times()[measure].verdict == verdict]
        if group:
            places = "in every setting" if len(group) == len(rows) > 1 else f"at {_listed(group)}"
            ratios = span([row.times()[measure].ratio for row in group], 3)
            parts.append(f"{verdict} {places} ({ratios} of the baseline)")
    return f"{TITLES[measure].capitalize()}: {'; '.join(parts)}."


def _memory_words(rows: Sequence[Row]) -> list[str]:
    peaks = [row.peak_memory for row in rows]
    ratios = [peak.ratio for peak in peaks if peak.ratio is not None]
    reasons = dict.fromkeys(peak.reason for peak in peaks if peak.reason is not None)
    words = [f"Peak memory above the weights: {span(ratios, 2)} of the baseline."] if ratios else []
    return words + [f"Peak memory: {reason}." for reason in reasons]


def _pairs_words(record: Benchmark) -> str:
    pairs, covered = record.settings.repeats, percent(record.interval_coverage)
    if pairs < 3:
        return "Fewer than three pairs of runs give no interval, so nothing is called faster or slower."
    words = (
        f"A ratio is the median of {pairs} pairs of runs, its interval reaches from pair to pair and covers {covered}"
    )
    if record.interval_coverage < CLEAR:
        return f"{words}: too little to call anything faster or slower; five pairs are enough."
    return f"{words}. Faster or slower is only what has an interval without 1."


def _eviction_words(record: Benchmark) -> list[str]:
    asked = record.settings.evict
    if asked is None:
        return []
    about = parse_eviction(asked).rule.about
    return [
        f"The candidate evicts ({asked}): {about} stay. It has a single kind of cache, whose bytes include what is "
        "known of its tokens, and which stands beside the baseline's dynamic cache and beside its static one."
    ]


def _prediction_words(record: Benchmark) -> list[str]:
    if record.no_prediction is not None:
        return [f"{record.no_prediction[:1].upper()}{record.no_prediction[1:]}."]
    off = far_off(record)
    if not off:
        return ["Every prediction is within 20 % of what was measured."]
    row, measure, note = max(off, key=lambda entry: abs(entry[2].off))
    predictions = 3 * len(MEASURES) * len(record.rows)  # of each time: both sides and the ratio
    return [
        f"{len(off)} of {predictions} predictions are more than 20 % off; the farthest, {TITLES[measure]} at "
        f"{_short(row)}: {note.words}."
    ]


def _listed(rows: Sequence[Row]) -> str:
    """Name settings: context × batch = 512 × 1, 512 × 4."""
    return f"context × batch = {', '.join(map(_short, rows))}"


def _short(row: Row) -> str:
    return f"{row.context} × {row.batch}"

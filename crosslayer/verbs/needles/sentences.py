"""The sentences and table cells of a needle test."""

from crosslayer.eviction.running import SmallerCache
from crosslayer.output.formatting import listed, percent
from crosslayer.stats.shares import in_points
from crosslayer.verbs.needles.record import ScoreDifference
from crosslayer.verbs.needles.result import Needles

LOW = 0.05  # a baseline's score below which a candidate has nothing to lose


def sentences(record: Needles) -> list[str]:
    """Return the scores of each model by length, the differences, and how both are measured."""
    settings, written, paired = record.settings, [], ""
    for model, by_length in zip(record.models, record.by_length, strict=True):
        role = "baseline" if model is record.baseline else "candidate"
        name = f"The {role}, {model.name}," if record.baseline is not None or ", " in model.name else model.name
        shares = [f"{score.share.text(0, percent=True)} at {score.length:,}" for score in by_length]
        sentence = f"{name} retrieves {hidden_numbers(settings.keys)}: {', '.join(shares)} tokens"
        if settings.keys > 1:
            other, total = sum(score.other for score in by_length), sum(score.share.n for score in by_length)
            sentence += f"; {percent(other / total)} of its answers give another key's number"
        written.append(f"{sentence}.")
    if record.baseline is not None:
        paired = "; Agresti and Min for paired differences, with McNemar's test"
        written += [_difference_sentence(difference) for difference in record.differences]
        low = [f"{score.length:,}" for score in record.by_length[1] if score.share.value < LOW]
        if low:
            written.append(
                f"At {listed(low)} tokens the baseline itself retrieves fewer than {LOW:.0%}, so the candidate has "
                "nothing to lose there."
            )
    written += SmallerCache(settings.evict, settings.kv_bits).sentences()
    depths = len(settings.depths)
    return [
        *written,
        f"A score is the share of greedy answers (up to {settings.new_tokens} tokens) that contain the number, over "
        f"{depths * settings.samples} samples per length: {settings.samples} at each of {depths} depths. 95% intervals "
        f"over samples: Wilson for scores{paired}.",
    ]


def hidden_numbers(count: int) -> str:
    """Return what is asked for in a text with `count` keys."""
    return "the hidden number" if count == 1 else f"one of {count} hidden numbers"


def _difference_sentence(difference: ScoreDifference) -> str:
    change = difference.change
    return (
        f"At {difference.length:,} tokens the scores differ by {in_points(change).text(0, signed=True)} points: "
        f"{change.verdict}; {difference.gained} of {change.n} retrieved only by the candidate, {difference.lost} by the"
        " baseline."
    )

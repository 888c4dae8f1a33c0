"""What a search for needles shows, in sentences."""

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.output.formatting import listed, percent, percent_interval, signed
from crosslayer.verbs.needles.record import FoundDifference, FoundShare
from crosslayer.verbs.needles.result import Needles

LOW = 0.05  # a score of a baseline that leaves nothing to lose


def sentences(record: Needles) -> list[str]:
    """Return the scores of each side by length, the differences, and how both are measured."""
    settings, said, paired = record.settings, [], ""
    for side, by_length in zip(record.sides, record.by_length, strict=True):
        name = f"The baseline, {side.name}," if side is record.baseline else side.name
        shares = [f"{share(score)} at {score.length:,}" for score in by_length]
        words = f"{name} finds the number of {keys_of(settings.keys)}: {', '.join(shares)} tokens"
        if settings.keys > 1:
            other, asked = sum(score.other for score in by_length), sum(score.n for score in by_length)
            words += f"; {percent(other / asked)} of its answers hold another key's instead"
        said.append(f"{words}.")
    if record.baseline is not None:
        paired = "; of differences Agresti and Min's, for pairs, beside McNemar's test"
        said += [_difference_words(difference) for difference in record.differences]
        idle = [f"{score.length:,}" for score in record.by_length[1] if score.share < LOW]
        if idle:
            said.append(
                f"At {listed(idle)} tokens the baseline itself finds fewer than {LOW:.0%}: nothing can be lost."
            )
    if settings.evict is not None:
        about = parse_eviction(settings.evict).rule.about
        said.append(f"The cache of {record.candidate.name} evicts ({settings.evict}): {about} stay.")
    depths = len(settings.depths)
    return [
        *said,
        f"A score is the share of greedy answers of up to {settings.new_tokens} tokens that hold the number; "
        f"{depths * settings.samples} samples a length, {settings.samples} at each of {depths} depths. 95% intervals "
        f"over samples: of scores Wilson's{paired}.",
    ]


def keys_of(count: int) -> str:
    """Return how many keys there are, in words."""
    return "the only key" if count == 1 else f"one of {count} keys"


def share(score: FoundShare) -> str:
    """Write a score with its interval: 68% (54 to 79%)."""
    return f"{percent(score.share)} ({percent_interval(score.interval)})"


def points(difference: FoundDifference) -> str:
    """Write a difference in points of a hundred, with its interval."""
    mean, low, high = (signed(100 * end, 0) for end in (difference.mean, *difference.interval))
    return f"{mean} points ({low} to {high})"


def _difference_words(difference: FoundDifference) -> str:
    than = "" if difference.verdict == "no difference seen" else " than the baseline's"
    return (
        f"At {difference.length:,} tokens the score differs by {points(difference)}: {difference.verdict}{than}; "
        f"{difference.gained} of {difference.n} found by the candidate alone, {difference.lost} by the baseline alone."
    )

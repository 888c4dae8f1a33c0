"""What a search for needles shows, in sentences."""

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.verbs.needles.record import Difference, Score, Side
from crosslayer.verbs.needles.result import Needles

LOW = 0.05  # a score of a baseline that leaves nothing to lose


def sentences(record: Needles) -> list[str]:
    """Return the scores of each side by length, the differences, and what neither can show."""
    said = [_of_side(side, record) for side in record.sides]
    if record.baseline is not None:
        said += [_of_difference(difference) for difference in record.differences]
        idle = [score.length for score in record.baseline.by_length if score.share < LOW]
        if idle:
            said.append(
                f"At {_listed(idle)} tokens the baseline itself finds fewer than {LOW:.0%}: a candidate cannot lose "
                "there what was never found."
            )
    if record.settings.evict is not None:
        about = parse_eviction(record.settings.evict).rule.about
        said.append(f"The cache of {record.candidate.name} evicts ({record.settings.evict}): {about} stay.")
    return [*said, _of_method(record)]


def keys_of(count: int) -> str:
    """Return how many keys there are, in words."""
    return "the only key" if count == 1 else f"one of {count} keys"


def percent(share: float) -> str:
    """Return a share in whole per cent."""
    return f"{100 * share:.0f}%"


def interval_of(score: Score) -> str:
    """Return the ends of a score's interval."""
    return f"{100 * score.interval[0]:.0f} to {100 * score.interval[1]:.0f}%"


def points(difference: Difference) -> str:
    """Return a difference in points of a hundred, with its interval."""
    low, high = difference.interval
    return f"{_signed(difference.mean)} points ({_signed(low)} to {_signed(high)})"


def _of_side(side: Side, record: Needles) -> str:
    shares = [f"{percent(score.share)} ({interval_of(score)}) at {score.length:,}" for score in side.by_length]
    other, asked = sum(score.other for score in side.by_length), sum(score.n for score in side.by_length)
    stray = ""
    if record.settings.keys > 1:
        stray = f"; {percent(other / asked)} of all its answers hold another key's instead"
    name = f"The baseline, {side.name}," if side is record.baseline else side.name
    return f"{name} finds the number of {keys_of(record.settings.keys)}: {', '.join(shares)} tokens{stray}."


def _of_method(record: Needles) -> str:
    settings, paired = record.settings, ""
    if record.baseline is not None:
        paired = "; of differences Agresti and Min's, for pairs, beside McNemar's test"
    return (
        f"A score is the share of greedy answers of up to {settings.new_tokens} tokens that hold the number; "
        f"{len(settings.depths) * settings.samples} samples a length, {settings.samples} at each of "
        f"{len(settings.depths)} depths. Intervals of 95% over samples: of scores Wilson's{paired}."
    )


def _of_difference(difference: Difference) -> str:
    verdict = difference.verdict
    words = verdict if verdict == "no difference seen" else f"{verdict} than the baseline's"
    return (
        f"At {difference.length:,} tokens the score differs by {points(difference)}: {words}; {difference.gained} of "
        f"{difference.n} found by the candidate alone, {difference.lost} by the baseline alone."
    )


def _signed(share: float) -> str:
    return f"{100 * share:+.0f}".replace("-", "−")


def _listed(lengths: list[int]) -> str:
    return " and ".join(f"{length:,}" for length in lengths)

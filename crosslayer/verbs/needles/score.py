"""How answers are scored: RULER's `string_match` (arXiv 2404.06654).

A score is the share of expected values that stand in the output, in any case; here one value is expected, so 0 or 1.
"""

import re
from collections.abc import Sequence

from crosslayer.stats.shares import share_difference, wilson
from crosslayer.verbs.needles.record import Difference, Score

_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match(output: str, values: Sequence[str]) -> float:
    """Return the share of the expected values (one at least) that stand in an output, in any case."""
    cleaned = _CONTROL.sub("\n", output.strip()).strip().lower()
    return sum(value.lower() in cleaned for value in values) / len(values)


def is_found(output: str, value: str) -> bool:
    """Return whether the only value that is expected stands in an output."""
    return string_match(output, [value]) == 1.0


def score(length: int, depth: int | None, found: Sequence[bool], other: Sequence[bool]) -> Score:
    """Return the score of n answers: whether each holds the value, and whether it holds that of another key.

    An answer with both counts as found alone, as RULER has it.
    """
    strayed = [stray and not right for right, stray in zip(found, other, strict=True)]
    return Score(
        length=length,
        depth=depth,
        n=len(found),
        found=sum(found),
        other=sum(strayed),
        interval=wilson(sum(found), len(found)),
    )


def difference(length: int, candidate: Sequence[bool], baseline: Sequence[bool]) -> Difference:
    """Return the difference candidate − baseline of shares over n samples that both were asked, with its interval.

    Raises:
        ValueError: the sides are of different lengths, or empty.

    """
    pairs = list(zip(candidate, baseline, strict=True))
    gained, lost = pairs.count((True, False)), pairs.count((False, True))
    interval = share_difference(gained, lost, len(pairs))
    return Difference(length=length, n=len(pairs), gained=gained, lost=lost, interval=interval)

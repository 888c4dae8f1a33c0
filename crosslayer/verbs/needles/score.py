"""How answers are scored, and what shares of right answers say.

A score is RULER's `string_match`: the share of expected values that stand in the output, in any case; here one value is
expected, so 0 or 1. Sources: RULER, arXiv 2404.06654; the interval of a share, Wilson (1927); that of a difference of
paired shares, Newcombe (1998), Statistics in Medicine 17, 2635-2650, method 10 without continuity correction. Student's
t over pairs would give an interval of no width where no pair differs, which is frequent here.
"""

import math
import re
from collections.abc import Sequence

from scipy import stats

from crosslayer.verbs.needles.record import Difference, Score

LEVEL = 0.95
Interval = tuple[float, float]
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


def wilson(found: int, n: int) -> Interval:
    """Return Wilson's 95 % interval of a share of n."""
    interval = stats.binomtest(found, n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def difference(length: int, candidate: Sequence[bool], baseline: Sequence[bool]) -> Difference:
    """Return the difference candidate − baseline of shares over n samples that both were asked, with its interval.

    Raises:
        ValueError: the sides are of different lengths, or empty.

    """
    pairs = list(zip(candidate, baseline, strict=True))
    both, gained = pairs.count((True, True)), pairs.count((True, False))
    lost, neither = pairs.count((False, True)), pairs.count((False, False))
    return Difference(
        length=length,
        n=len(pairs),
        gained=gained,
        lost=lost,
        interval=newcombe(both, gained, lost, neither),
    )


def newcombe(both: int, gained: int, lost: int, neither: int) -> Interval:
    """Return Newcombe's 95 % interval of a difference of paired shares.

        d − √(a² − 2φab + b²)  to  d + √(c² − 2φce + e²),    d = (gained − lost) / n

    a and c are how far Wilson's interval of the candidate's share reaches down and up from it, e and b the same of the
    baseline's; φ is the correlation of the pairs, 0 where a share is 0 or 1.

    Args:
        both: pairs in which both sides have found the value.
        gained: only the candidate has.
        lost: only the baseline has.
        neither: none has.

    Raises:
        ValueError: there is no pair.

    """
    n = both + gained + lost + neither
    if not n:
        raise ValueError("pairs need at least one sample that both sides were asked; got none")
    first, second = (both + gained) / n, (both + lost) / n
    low, high = wilson(both + gained, n)
    low_second, high_second = wilson(both + lost, n)
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    correlation = (both * neither - gained * lost) / math.sqrt(margins) if margins else 0.0
    below = _combined(first - low, high_second - second, correlation)
    above = _combined(high - first, second - low_second, correlation)
    return first - second - below, first - second + above


def _combined(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))

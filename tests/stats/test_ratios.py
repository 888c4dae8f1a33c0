"""The statistics of pairs against naive ones and against scipy's."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from scipy.stats import quantile_test

from crosslayer.stats.times import coverage, paired_ratio


def test_the_ratio_is_the_median_of_pairs():
    generator = random.Random(3)
    baseline = [generator.uniform(1, 2) for _ in range(9)]
    candidate = [b * generator.uniform(0.8, 1.0) for b in baseline]
    ratio = paired_ratio(candidate, baseline)
    pairs = sorted(c / b for c, b in zip(candidate, baseline, strict=True))
    assert ratio.value == pytest.approx(statistics.median(pairs)) and (ratio.n, ratio.none) == (9, 1)
    assert ratio.interval == pytest.approx((pairs[1], pairs[-2]))
    assert paired_ratio([3, 1], [1, 1]).value == pytest.approx(math.sqrt(3))
    assert paired_ratio([2.0] * 5, [1.0] * 5).interval == pytest.approx((2.0, 2.0))


def coins(pairs):
    """How often the median is between the ends, over every way in which pairs fall above (1) or below (0) it."""
    ratios = [1.5] * pairs
    held = 0
    for sides in itertools.product((0, 1), repeat=pairs):
        found = paired_ratio([r if side else 1 / r for r, side in zip(ratios, sides, strict=True)], [1.0] * pairs)
        held += found.low <= 1 <= found.high
    return held / 2**pairs


def test_the_coverage_is_what_the_pairs_give():
    assert coverage(5) == 0.9375
    assert {coverage(n) for n in range(5)} == {0}  # there is no interval
    for pairs in range(5, 13):
        assert coverage(pairs) == pytest.approx(coins(pairs)), pairs
        assert pairs < 6 or coverage(pairs) >= 0.95
    assert 0.95 <= coverage(40) < 0.97
    generator = np.random.default_rng(1)
    intervals = [paired_ratio([*np.exp(generator.normal(size=5) ** 3)], [1.0] * 5).interval for _ in range(2000)]
    assert np.mean([low <= 1 <= high for low, high in intervals]) == pytest.approx(0.9375, abs=0.015)  # type: ignore[misc]


@pytest.mark.parametrize("pairs", [1, 3, 4])
def test_fewer_than_five_pairs_give_no_interval_and_no_verdict(pairs):
    found = paired_ratio([1.0] * pairs, [2.0] * pairs)
    assert found.interval is None and found.verdict is None
    assert paired_ratio([1.0] * 5, [2.0] * 5).verdict == "lower"


def test_from_six_pairs_on_the_interval_is_scipys():
    generator = np.random.default_rng(2)
    for pairs in range(6, 41):
        ratios = np.exp(generator.normal(size=pairs))
        ends = quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)
        assert paired_ratio([*ratios], [1.0] * pairs).interval == pytest.approx((ends.low, ends.high)), pairs

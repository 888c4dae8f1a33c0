"""The statistics of pairs against naive ones and against scipy's."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from scipy.stats import quantile_test

from crosslayer.stats.ratios import coverage, paired_ratio, verdict


def test_the_ratio_is_the_median_of_pairs():
    generator = random.Random(3)
    baseline = [generator.uniform(1, 2) for _ in range(9)]
    candidate = [b * generator.uniform(0.8, 1.0) for b in baseline]
    ratio, interval = paired_ratio(candidate, baseline)
    pairs = sorted(c / b for c, b in zip(candidate, baseline, strict=True))
    assert ratio == pytest.approx(statistics.median(pairs))
    assert interval == pytest.approx((pairs[1], pairs[-2]))
    assert paired_ratio([3, 1], [1, 1]) == (pytest.approx(math.sqrt(3)), None)
    assert paired_ratio([2.0] * 4, [1.0] * 4) == (2.0, (2.0, 2.0))


def coins(pairs):
    """How often the median is between the ends, over every way in which pairs fall above (1) or below (0) it."""
    ratios = [1.5] * pairs
    held = 0
    for sides in itertools.product((0, 1), repeat=pairs):
        _, interval = paired_ratio([r if side else 1 / r for r, side in zip(ratios, sides, strict=True)], [1.0] * pairs)
        assert interval is not None
        held += interval[0] <= 1 <= interval[1]
    return held / 2**pairs


def test_the_coverage_is_what_the_pairs_give():
    assert [coverage(n) for n in (3, 5)] == [0.75, 0.9375]
    assert {coverage(n) for n in range(3)} == {0}  # there is no interval
    for pairs in range(3, 13):
        assert coverage(pairs) == pytest.approx(coins(pairs)), pairs
        assert pairs < 6 or coverage(pairs) >= 0.95
    assert 0.95 <= coverage(40) < 0.97
    generator = np.random.default_rng(1)
    intervals = [paired_ratio([*np.exp(generator.normal(size=5) ** 3)], [1.0] * 5)[1] for _ in range(2000)]
    assert np.mean([low <= 1 <= high for low, high in intervals]) == pytest.approx(0.9375, abs=0.015)  # type: ignore[misc]


def test_nothing_is_faster_or_slower_without_an_interval_that_supports_it():
    intervals = ([0.8, 0.9], [1.1, 1.2], [0.9, 1.1], [0.9, 1.0], None)
    assert [verdict(x, 5) for x in intervals] == ["faster", "slower", *["no difference seen"] * 2, "too few pairs"]
    assert {verdict(x, 4) for x in intervals} == {"too few pairs"}  # 87.5 %


def test_from_six_pairs_on_the_interval_is_scipys():
    generator = np.random.default_rng(2)
    for pairs in range(6, 41):
        ratios = np.exp(generator.normal(size=pairs))
        ends = quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)
        assert paired_ratio([*ratios], [1.0] * pairs)[1] == pytest.approx((ends.low, ends.high)), pairs

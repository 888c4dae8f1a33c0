"""Times of two models: medians, quartiles and the ratio of pairs."""

import pytest

from crosslayer.stats.times import compare_times


def test_a_comparison_has_the_median_of_pairs_not_the_ratio_of_medians():
    candidate, baseline = [1.0, 2.0, 9.0, 4.0, 5.0], [2.0, 2.5, 10.0, 2.0, 20.0]  # ratios 0.5, 0.8, 0.9, 2, 0.25
    time = compare_times(candidate, baseline)
    assert time.change.value == pytest.approx(0.8) and time.change.interval == pytest.approx((0.25, 2.0))
    assert (time.candidate.median, time.candidate.quartiles) == (4.0, (2.0, 5.0))
    assert time.candidate.spread == pytest.approx(1.5) and time.change.verdict == "no difference seen"
    assert time.durations() == "4 s / 2.5 s"
    assert compare_times([0.5] * 5, [1.0] * 5).change.verdict == "lower"

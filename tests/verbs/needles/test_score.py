"""Scores and their intervals, against formulas, simulated pairs, and lm-eval's own metric."""

import math

import numpy as np
import pytest

from crosslayer.judge.hidden import is_retrieved
from crosslayer.judge.rows import retrieval_change
from crosslayer.stats.differences import paired_difference, share, share_difference

Z = 1.959963984540054


@pytest.mark.parametrize(("found", "n"), [(0, 10), (3, 20), (20, 20), (51, 100)])
def test_wilson(found, n):
    value, square = found / n, Z**2 / n
    middle = (value + square / 2) / (1 + square)
    half = Z * math.sqrt(value * (1 - value) / n + square / (4 * n)) / (1 + square)
    assert share(found, n).interval == pytest.approx((middle - half, middle + half), abs=1e-12)


def test_an_answer_retrieves_the_value_that_it_contains():
    assert is_retrieved(" is\t1234567.\n", "1234567")
    assert not is_retrieved("123456", "1234567")


def test_the_difference_of_pairs():
    candidate, baseline = [True, True, False, False, False], [True, False, True, True, False]
    both = retrieval_change(candidate, baseline)
    assert both.value == pytest.approx(-0.2) and both.verdict == "no difference seen"
    mirrored = retrieval_change(baseline, candidate)
    assert mirrored.interval == pytest.approx((-both.high, -both.low))
    worse = retrieval_change([False] * 40, [True] * 40)
    assert worse.verdict == "lower" and worse.value == -1 == pytest.approx(worse.low)
    with pytest.raises(ValueError, match="shorter"):
        retrieval_change([True], [])
    with pytest.raises(ValueError, match="one sample"):
        retrieval_change([], [])


def test_pairs_that_never_differ_have_an_interval_all_the_same():
    low, high = share_difference(0, 0, 50).interval
    assert low == -high and 0.03 < high < 0.04
    assert paired_difference([0.0] * 50, [0.0] * 50).interval == (0, 0)  # which Student's t would take for certain


def test_the_interval_is_students_where_both_hold():
    """With many pairs and shares far from 0 and 1."""
    pairs = np.random.default_rng(0).random((4000, 3))
    baseline = pairs[:, 0] < 0.5
    candidate = np.where(pairs[:, 1] < 0.8, baseline, pairs[:, 2] < 0.3)
    expected = paired_difference([*candidate.astype(float)], [*baseline.astype(float)])
    found = retrieval_change(candidate.tolist(), baseline.tolist())
    assert found.value == pytest.approx(expected.value)
    assert found.interval == pytest.approx(expected.interval, abs=5e-4)


@pytest.mark.parametrize("shares", [(0.02, 0.05, 0.02), (0.6, 0.1, 0.25), (0.9, 0.05, 0.02)])
def test_the_interval_covers_what_it_should(shares):
    draws = np.random.default_rng(1).multinomial(50, [*shares, 1 - sum(shares)], size=2000)
    truth, covered = shares[1] - shares[2], 0
    for counts, times in zip(*np.unique(draws, axis=0, return_counts=True), strict=True):
        low, high = share_difference(int(counts[1]), int(counts[2]), 50).interval
        covered += int(times) * (low <= truth <= high)
    assert 0.93 < covered / 2000 < 0.995

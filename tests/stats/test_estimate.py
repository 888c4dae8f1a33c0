"""The one value with an interval: verdicts, text, and the coverage of the prediction interval in a simulation."""

import numpy as np
import pytest

from crosslayer.stats.estimate import Estimate, new_domain


def estimate(value, low=None, high=None, **facts):
    return Estimate(value=value, low=low, high=high, n=9, over="windows", how="bootstrap", **facts)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (estimate(-0.2, -0.3, -0.1), "lower"),
        (estimate(0.2, 0.1, 0.3), "higher"),
        (estimate(0.2, 0.0, 0.3), "no difference seen"),
        (estimate(0.2), None),
        (estimate(0.2, 0.1, 0.3, p=0.2), "no difference seen"),
        (estimate(0.2, 0.1, 0.3, p=0.04), "higher"),
        (estimate(0.9, 0.8, 0.95, none=1), "lower"),
        (estimate(1.1, 0.8, 1.2, none=1), "no difference seen"),
        (estimate(1.00009, 1.00008, 1.0001, none=1), "no difference seen"),  # a ratio that no purpose notices
        (estimate(1.0002, 1.0001, 1.0003, none=1), "higher"),
        (estimate(0.9998, 0.9998, 0.9998, none=1), "lower"),
    ],
)
def test_verdicts(found, verdict):
    assert found.verdict == verdict
    assert found.is_better("lower") is {"lower": True, "higher": False}.get(verdict)


def test_text():
    assert estimate(0.343, 0.324, 0.363).text() == "0.343 (0.324-0.363)"
    assert estimate(-0.031, -0.04, -0.022).text(signed=True) == "−0.031 (−0.040 to −0.022)"
    assert estimate(0.031, -0.004, 0.022).text(signed=True) == "+0.031 (−0.004 to +0.022)"
    assert estimate(0.5, 0.25, 0.75).text(0, percent=True) == "50% (25%-75%)"
    assert estimate(0.5).text(1) == "0.5 (–)" and estimate(2, 1, 3).text(0, unit="x") == "2x (1-3)"


def test_an_estimate_of_a_function_of_the_value():
    inverse = estimate(0.5, 0.4, 0.8, none=1).mapped(lambda ratio: 1 / ratio)
    assert (inverse.value, *inverse.interval, inverse.none) == (2, 1.25, 2.5, 1) and inverse.verdict == "higher"
    assert estimate(0.5).mapped(lambda share: 100 * share).interval is None


@pytest.mark.parametrize("facts", [{"value": 0.0}, {"value": 0.5, "low": -0.1, "high": 1.0}])
def test_a_ratio_is_above_0(facts):
    with pytest.raises(ValueError, match="ratio.*0"):
        estimate(**facts, none=1)


def test_a_new_domain_is_within_the_prediction_interval_as_often_as_promised():
    """4,000 times six domains and a seventh: the share within must be 95 %, ± 3 standard errors of that share."""
    draw, inside, over_means = np.random.default_rng(0), 0, 0
    trials = 4000
    for means in draw.normal(0.3, 0.1, (trials, 7)):
        found = new_domain(means[:6])
        inside += found.low <= means[6] <= found.high
        half = 2.5706 * means[:6].std(ddof=1) / np.sqrt(6)
        over_means += abs(means[6] - means[:6].mean()) <= half
    assert abs(inside / trials - 0.95) < 3 * np.sqrt(0.95 * 0.05 / trials)
    assert over_means / trials < 0.75  # the interval of the mean does not promise that
    assert new_domain(np.array([1.0, 2.0])).interval is None

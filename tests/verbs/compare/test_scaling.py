"""Power laws: planted exponents, published coefficients, the cover of the interval."""

import numpy as np
import pytest

from crosslayer.stats.estimate import Estimate
from crosslayer.verbs.compare.outcomes import PowerLaw, fit_power_law, relative_cost

SIZES = [2e6, 10e6, 82e6, 180e6, 468e6]


def power_law(scale, exponent):
    found = Estimate(value=exponent, n=2, over="configurations", how="Student's t")
    return PowerLaw(scale, found, 1, 10)


def test_a_planted_exponent_comes_back():
    law = fit_power_law(SIZES, [1.891 * size**-0.057 for size in SIZES])
    assert abs(law.exponent.value - 0.057) < 1e-9 and abs(law.scale - 1.891) < 1e-8
    generator = np.random.default_rng(0)
    noisy = fit_power_law(SIZES, [1.891 * size**-0.057 * np.exp(generator.normal(0, 1e-3)) for size in SIZES])
    assert abs(noisy.exponent.value - 0.057) < 1e-3


def test_the_interval_covers_as_often_as_it_says():
    generator, held = np.random.default_rng(0), 0
    for _ in range(2000):
        losses = [2.0 * size**-0.06 * np.exp(generator.normal(0, 0.01)) for size in SIZES]
        low, high = fit_power_law(SIZES, losses).exponent.interval
        held += low <= 0.06 <= high
    assert 0.94 < held / 2000 < 0.96  # the standard error of a share of 0.95 among 2000 is 0.005


def test_published_coefficients_of_attention_residuals():
    """1.25 times the compute at 5.6 PFLOP/s-days, the paper says, of its block form."""
    baseline, block = power_law(1.891, 0.057), power_law(1.870, 0.058)
    assert abs(relative_cost(block, baseline, 1.25 * 5.6) - 1 / 1.25) < 0.01
    assert np.isclose(relative_cost(baseline, baseline, 3.0), 1)


def test_a_law_that_does_not_fall_or_is_far_away_gives_no_cost():
    baseline = power_law(2.0, 0.05)
    for other in (power_law(2.0, 0.0), power_law(2.0, -0.1), power_law(9.0, 1e-9)):
        assert relative_cost(other, baseline, 5.0) is None


def test_two_points_have_no_interval():
    law = fit_power_law([1.0, 2.0], [3.0, 2.5])
    assert law.exponent.interval is None and np.isclose(law.loss(2.0), 2.5) and (law.smallest, law.largest) == (1, 2)


@pytest.mark.parametrize(
    ("costs", "losses", "message"),
    [
        ([1.0, 1.0], [2.0, 2.1], "at least two different costs, each with its loss, got 1"),
        ([1.0, 2.0], [2.0], "at least two different costs, each with its loss"),
        ([1.0, 0.0], [2.0, 2.1], "costs and losses above 0"),
        ([1.0, 2.0], [2.0, float("nan")], "costs and losses above 0"),
    ],
)
def test_points_without_a_law_are_refused(costs, losses, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(costs, losses)

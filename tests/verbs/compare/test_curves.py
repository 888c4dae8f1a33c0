"""Relative curves: smoothing against a loop, planted crossings."""

import numpy as np
import pytest

import crosslayer
from crosslayer.stats.differences import t_ends
from crosslayer.training.record import Curve
from crosslayer.verbs.compare.outcomes import critical_point, smoothed
from tests.helpers.runs import run, written


@pytest.mark.parametrize("window", [1, 3, 10, 50])
def test_smoothing_equals_a_loop(window):
    curves = np.random.default_rng(0).normal(size=(2, 20))
    expected = [[curve[max(0, n + 1 - window) : n + 1].mean() for n in range(20)] for curve in curves]
    assert np.allclose(smoothed(curves, window), expected, atol=1e-12)


def test_a_planted_crossing():
    steps = np.arange(0, 1000, 7)
    assert np.isclose(critical_point(steps, 0.001 * (steps - 333.3)), 333.3)
    wave = 0.001 * (steps - 500) + np.where((steps > 200) & (steps < 230), 1.0, 0.0)  # above 0 only briefly
    assert np.isclose(critical_point(steps, wave), 500)


@pytest.mark.parametrize("relative", [[0.1, 0.2, 0.3], [-0.1, 0.2, -0.3], [-3.0, -2.0, -1.0]], ids=str)
def test_a_curve_that_is_not_overtaken_has_no_critical_point(relative):
    assert critical_point(np.arange(3), np.array(relative)) is None


@pytest.mark.parametrize(
    ("every", "last", "smooth", "entries"),
    [(10, 120, None, 1), (10, 1000, None, 5), (10, 120, 30, 3), (50, 500, 10, 1)],
)
def test_steps_are_smoothed_in_whole_logged_entries(tmp_path, every, last, smooth, entries):
    steps = list(range(every, last + 1, every))
    curve = Curve(**{name: [1.0] * len(steps) for name in Curve.model_fields} | {"steps": steps})
    runs = [run(variant, steps=last, validation=[3.0]) for variant in ("vanilla", "resformer")]
    folders = written(tmp_path, *(each.model_copy(update={"curve": curve}) for each in runs))
    assert crosslayer.compare(folders, smooth=smooth).outcomes[0].curve.window == entries


def test_the_band_is_an_interval_of_three_curves():
    curves = np.random.default_rng(0).normal(size=(3, 5))
    low, high = t_ends(curves)
    half = 4.30265 * curves.std(axis=0, ddof=1) / np.sqrt(3)
    assert np.allclose(high - curves.mean(axis=0), half, rtol=1e-5) and np.allclose(high + low, 2 * curves.mean(axis=0))
    assert t_ends(curves[:2]) is None

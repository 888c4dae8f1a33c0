"""When the moving average of a loss has stopped to fall."""

import math

import pytest

from crosslayer.recovery.early_stop import averages, has_stopped_falling


def first_end(losses, smoothing, patience, least=0.001):
    ends = (k for k in range(1, len(losses) + 1) if has_stopped_falling(losses[:k], smoothing, patience, least))
    return next(ends, None)


def test_the_average_is_the_weighted_mean():
    losses, beta = [3.0, 1.0, 2.0, 5.0], 0.7
    for k in range(1, 5):
        weights = [beta ** (k - 1 - i) for i in range(k)]
        expected = sum(w * loss for w, loss in zip(weights, losses[:k], strict=True)) / sum(weights)
        assert averages(losses, beta)[k - 1] == pytest.approx(expected)


def test_a_falling_loss_never_ends():
    assert first_end([5 * 0.99**k for k in range(500)], 0.9, 5) is None


def test_a_constant_loss_ends_after_the_patience():
    assert first_end([2.0] * 50, 0.0, 7) == 8  # the first is the lowest, and seven more did not go below it


def test_a_plateau_ends_soon_after_it_begins():
    losses = [4 - 0.02 * k for k in range(100)] + [2.02] * 200
    end = first_end(losses, 0.9, 20)
    assert end is not None and 120 <= end < 170


def test_noise_on_a_falling_curve_does_not_end_it_and_a_rise_does():
    noise = [0.3 * math.sin(7.7 * k * k) for k in range(900)]
    falling = [5 - 0.005 * k + noise[k] for k in range(600)]
    assert first_end(falling, 0.95, 50) is None
    assert first_end(falling, 0.0, 3) is not None  # without the average it would
    rising = falling + [2 + 0.01 * k for k in range(300)]
    end = first_end(rising, 0.95, 50)
    assert end is not None and 640 < end < 720


def test_a_fall_that_is_too_slow_to_count_ends_it():
    slow = [3 * (1 - 1e-5) ** k for k in range(200)]  # 0.05 % in 50 steps
    assert first_end(slow, 0.0, 50) == 51
    assert first_end(slow, 0.0, 50, least=1e-4) is None


def test_no_losses_do_not_end_it():
    assert not has_stopped_falling([], 0.9, 1, 0.001)

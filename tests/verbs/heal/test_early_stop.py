"""When the moving average of a loss has stopped falling."""

import math

import numpy as np
import pytest

from crosslayer.training.callbacks import EarlyStop, averages, end_of
from tests.helpers.training import trainer_of


def first_end(losses, smoothing, patience, least=0.001):
    return end_of(losses, smoothing, patience, least)


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


def test_noise_at_the_start_of_a_real_curve_does_not_end_it_and_its_plateau_does():
    """A loss that falls by 0.25 with a time constant of 150, and varies by 0.2 from batch to batch."""
    steps = np.arange(4000)
    curve = 1.75 + 0.25 * np.exp(-steps / 150)
    noise = np.random.default_rng(0).normal(0, 0.2, (400, len(steps)))
    ends = [first_end((curve + noise[seed]).tolist(), 0.95, 50) for seed in range(400)]
    assert all(end is not None for end in ends)
    early = [end for end in ends if end is not None and end <= 60]
    assert len(early) < 0.05 * len(ends)
    assert sum(end is not None and end <= 100 for end in ends) < 0.25 * len(ends)  # the average's own noise


def test_an_average_counts_from_its_first_full_window():
    ends = [first_end([1.0] * 30, smoothing, 1, 0.1) for smoothing in (0.0, 0.5, 0.9, 0.95)]
    assert ends == [2, 3, 11, 21]  # the first best is that of the loss before


def test_no_checkpoint_is_left_of_the_step_that_ends_it(tmp_path):
    """A resumed run would go on from there, and train longer than the one that was not interrupted."""
    trainer = trainer_of(tmp_path)  # saves every second step
    trainer.add_callback(EarlyStop(0.0, 3, 0.9))
    trainer.train()
    assert trainer.state.global_step == 4
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    again = trainer_of(tmp_path)
    again.add_callback(EarlyStop(0.0, 3, 0.9))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4

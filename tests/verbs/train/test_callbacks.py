"""Checkpoints by the clock."""

from types import SimpleNamespace

from crosslayer.training import callbacks
from crosslayer.training.callbacks import SaveByTime
from crosslayer.training.checkpoints import checkpoints
from tests.helpers.training import trainer_of


def test_a_checkpoint_is_saved_when_its_time_has_come(tmp_path, monkeypatch):
    """Each reading of the clock is two minutes later: one at the start, one per step, and one after a checkpoint."""
    now = [0.0]

    def later():
        now[0] += 120
        return now[0]

    trainer = trainer_of(tmp_path, save_steps=100, save_total_limit=9)
    trainer.add_callback(SaveByTime(6))
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=later))
    trainer.train()
    assert list(checkpoints(tmp_path)) == [3, 6, 8]  # the last is the run's end


def test_one_by_steps_starts_the_clock_again(tmp_path, monkeypatch):
    now = iter(range(0, 10**6, 120))
    trainer = trainer_of(tmp_path, save_steps=2, save_total_limit=9)
    trainer.add_callback(SaveByTime(6))
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: next(now)))
    trainer.train()
    assert list(checkpoints(tmp_path)) == [2, 4, 6, 8]

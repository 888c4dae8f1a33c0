"""Checkpoints are complete or absent, and a damaged one is skipped."""

import json
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from crosslayer.training.checkpoints import MARK, PARTIAL, checkpoints, damage, last_good, publish, stage
from crosslayer.training.trainer import TrainingStopped
from tests.helpers.training import STEPS, Stop, losses, trainer_of

ROOT = Path(__file__).parents[3]


def written(folder: Path, *steps: int, keep: int | None = None) -> Path:
    for step in steps:
        staged = stage(folder) / f"checkpoint-{step}" / "deeper"
        staged.mkdir(parents=True)
        (staged / "weights").write_bytes(bytes(100))
        (staged.parent / "state").write_text(str(step))
        publish(folder, step, keep)
    return folder


def cut(checkpoint: Path) -> None:
    with (checkpoint / "deeper" / "weights").open("r+b") as file:
        file.truncate(60)


def flip(checkpoint: Path) -> None:
    (checkpoint / "state").write_text("x" * len((checkpoint / "state").read_text()))


def lose(checkpoint: Path) -> None:
    (checkpoint / "deeper" / "weights").unlink()


def link(checkpoint: Path) -> None:
    (checkpoint / "state").rename(checkpoint.parent / "elsewhere")
    (checkpoint / "state").symlink_to(checkpoint.parent / "elsewhere")


def unmark(checkpoint: Path) -> None:
    (checkpoint / MARK).unlink()


def garble(checkpoint: Path) -> None:
    (checkpoint / MARK).write_text("{")


def name_outside(checkpoint: Path) -> None:
    mark = json.loads((checkpoint / MARK).read_text())
    mark["files"]["../checkpoint-10/state"] = mark["files"].pop("state")
    (checkpoint / MARK).write_text(json.dumps(mark))


DAMAGES = {
    cut: "deeper/weights must have 100 bytes, got 60",
    flip: "state has changed",
    lose: "deeper/weights is missing",
    link: "state is missing",
    unmark: "complete.json is missing",
    garble: "complete.json cannot be read",
    name_outside: "../checkpoint-10/state is missing",
}


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(harm, tmp_path):
    written(tmp_path, 9, 10, 11)
    assert last_good(tmp_path) == tmp_path / "checkpoint-11"
    harm(tmp_path / "checkpoint-11")
    with pytest.warns(UserWarning, match=f"skipping checkpoint-11: {DAMAGES[harm]}"):
        assert last_good(tmp_path) == tmp_path / "checkpoint-10"


def test_without_a_good_checkpoint_there_is_none(tmp_path):
    assert last_good(tmp_path / "nowhere") is None and last_good(tmp_path) is None
    unmark(written(tmp_path, 1) / "checkpoint-1")
    with pytest.warns(UserWarning, match="skipping checkpoint-1"):
        assert last_good(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path):
    written(tmp_path, 8, 9, 10, 100, keep=2)
    assert list(checkpoints(tmp_path)) == [10, 100]
    written(tmp_path, 101, 102)
    assert list(checkpoints(tmp_path)) == [10, 100, 101, 102]


def test_a_run_resumed_from_an_earlier_checkpoint_deletes_later_ones(tmp_path):
    written(tmp_path, 5, 10, 15, 20)
    (tmp_path / "checkpoint-10" / "old").touch()
    written(tmp_path, 10, keep=2)
    assert list(checkpoints(tmp_path)) == [5, 10]
    assert damage(tmp_path / "checkpoint-10") is None and not (tmp_path / "checkpoint-10" / "old").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-5", "checkpoint-10"}


def test_a_staged_folder_is_not_a_checkpoint(tmp_path):
    written(tmp_path, 1)
    (stage(tmp_path) / "checkpoint-2").mkdir()
    assert list(checkpoints(tmp_path)) == [1] and last_good(tmp_path) == tmp_path / "checkpoint-1"
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert not list(stage(tmp_path).iterdir())


def test_a_run_resumes_from_the_checkpoint_before_a_truncated_one(tmp_path):
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    trainer = trainer_of(tmp_path / "run")
    trainer.add_callback(Stop(5))
    trainer.train()
    with (tmp_path / "run" / "checkpoint-4" / "optimizer.pt").open("r+b") as file:
        file.truncate(1000)
    trainer = trainer_of(tmp_path / "run")
    with pytest.warns(UserWarning, match="skipping checkpoint-4: optimizer.pt must have .* got 1,000"):
        trainer.train(True)
    assert losses(trainer) == losses(whole)
    assert list(checkpoints(tmp_path / "run")) == [STEPS - 2, STEPS]


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    """A limit on file sizes simulates it: the weights fit, the optimizer states do not."""
    trainer = trainer_of(tmp_path)
    trainer.add_callback(Stop(3))
    trainer.train()
    good = tmp_path / "checkpoint-2"
    size = (good / "model.safetensors").stat().st_size
    assert (good / "optimizer.pt").stat().st_size > 1.5 * size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (round(1.5 * size), hard))
    try:
        message = f"step 4 could not be written into '{tmp_path}': a file could not .*; .*checkpoint is checkpoint-2$"
        with pytest.raises(TrainingStopped, match=message):
            trainer_of(tmp_path).train(True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / PARTIAL).exists() and list(checkpoints(tmp_path)) == [2]
    with warnings.catch_warnings(action="error"):
        assert last_good(tmp_path) == good


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_has_a_checkpoint(tmp_path):
    command = [sys.executable, "-m", "tests.verbs.train.killed", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 3  # so many times something was being written

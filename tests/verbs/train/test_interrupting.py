"""Ctrl-C during training: the current step is saved, and the resumed run has the same losses."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from transformers import TrainerCallback

from crosslayer.training.checkpoints import checkpoints, damage
from tests.cli.test_start import ROOT, heed
from tests.helpers.training import losses, recipe_in, trainer_of


class Press(TrainerCallback):
    """Presses Ctrl-C during the given steps, once for each time that a step is listed."""

    def __init__(self, *steps):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for _ in range(self.steps.count(state.global_step + 1)):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def interruptible():
    """Receive Ctrl-C also if the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_current_step_is_finished_and_saved(tmp_path, capfd):
    whole = trainer_of(tmp_path / "whole", logging_steps=3)
    whole.train()
    trainer = trainer_of(tmp_path / "run", logging_steps=3, save_steps=50)
    trainer.add_callback(Press(5))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert capfd.readouterr().err.count("interrupted; finishing and saving the current step") == 1
    assert list(checkpoints(tmp_path / "run")) == [5] and damage(tmp_path / "run" / "checkpoint-5") is None
    trainer = trainer_of(tmp_path / "run", logging_steps=3, save_steps=50)
    trainer.train(True)
    assert losses(trainer) == losses(whole)


def test_a_second_press_ends_at_once(tmp_path):
    trainer = trainer_of(tmp_path, save_steps=2)
    trainer.add_callback(Press(5, 5))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 4 and list(checkpoints(tmp_path)) == [2, 4]


def test_in_another_thread_signals_are_left_alone(tmp_path):
    thread = threading.Thread(target=lambda: trainer_of(tmp_path).train())
    thread.start()
    thread.join()
    assert list(checkpoints(tmp_path)) == [6, 8]


@pytest.mark.slow
def test_the_line_names_the_checkpoint_and_resume(tmp_path):
    recipe, out = recipe_in(tmp_path, schedule={"steps": 100_000}), tmp_path / "run"
    words = [sys.executable, "-m", "crosslayer", "train", str(recipe), "--out", str(out)]
    words += ["--set", "train.logging_steps=1", "--set", "train.save_steps=100000", "--set", "eval.every=0"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CROSSLAYER_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables}, preexec_fn=heed
    )
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if "loss" in line:
                break
        process.send_signal(signal.SIGINT)
        last = process.stderr.read().splitlines()[-1]
    assert process.wait(timeout=60) == 130
    (step,) = checkpoints(out)
    assert last.startswith("crosslayer: interrupted") and last.endswith(f"; --resume continues from checkpoint-{step}")

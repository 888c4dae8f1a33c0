"""Ctrl-C while a model is trained: the present step is saved, the run goes on from it as if nothing had been."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from transformers import TrainerCallback

from crosslayer.verbs.train.checkpoints import checkpoints, damage
from tests.cli.test_start import ROOT, heed
from tests.helpers.training import losses, recipe_in, trainer_of


class Press(TrainerCallback):
    """Presses Ctrl-C in the midst of steps, as often as they are named."""

    def __init__(self, *steps):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for _ in range(self.steps.count(state.global_step + 1)):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def interruptible():
    """Heed Ctrl-C, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_step_under_way_is_finished_and_saved(tmp_path, capfd):
    whole = trainer_of(tmp_path / "whole", logging_steps=3)
    whole.train()
    trainer = trainer_of(tmp_path / "run", logging_steps=3, save_steps=50)
    trainer.add_callback(Press(5))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert capfd.readouterr().err.count("interrupted; the step under way is finished and saved first") == 1
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
    places = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CROSSLAYER_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, **places}, preexec_fn=heed)
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if "loss" in line:
                break
        process.send_signal(signal.SIGINT)
        last = process.stderr.read().splitlines()[-1]
    assert process.wait(timeout=60) == 130
    (step,) = checkpoints(out)
    told = f"the last whole checkpoint is checkpoint-{step}, and --resume goes on from it"
    assert last == f"crosslayer: interrupted, nothing is half-written; {told}"

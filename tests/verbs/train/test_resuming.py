"""A run is resumed exactly or refused: damaged checkpoints and other batch sizes are errors of one line."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosslayer.training.checkpoints import MARK, checkpoints
from crosslayer.training.trainer import CrossLayerTrainer
from tests.helpers.daily import daily
from tests.helpers.training import STEPS, Random, Stop, course, losses, model_of, trainer_of


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    trainer = trainer_of(folder)
    trainer.add_callback(Stop(5))
    trainer.train()
    return folder


@pytest.fixture
def stopped(ended, tmp_path):
    """A run of 8 steps that ended after step 5, with checkpoints 2 and 4."""
    return shutil.copytree(ended, tmp_path / "run")


def forge(checkpoint, name, content):
    """Change a file of a checkpoint, and its hash in `complete.json`."""
    path = checkpoint / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    mark = json.loads((checkpoint / MARK).read_text())
    mark["files"][name] = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (checkpoint / MARK).write_text(json.dumps(mark))


def state(**changes):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def saved(value):
    return lambda path: torch.save(value, path)


def shortened(path):
    states = torch.load(path, weights_only=True)
    for entry in states["state"].values():
        entry["exp_avg"] = entry["exp_avg"].flatten()[:-1].clone()
    torch.save(states, path)


def rewound(path):
    torch.save(torch.load(path, weights_only=True) | {"last_epoch": 0}, path)


def without(path):
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})


GARBAGE = b"\x80\x05garbage" * 99
FORGED = {
    "another step": ("trainer_state.json", state(global_step=99), "trainer_state.json is of step 99"),
    "an earlier step": ("trainer_state.json", state(global_step=2), "trainer_state.json is of step 2"),
    "no state": ("trainer_state.json", b"{", "trainer_state.json is damaged"),
    "a state of text": ("trainer_state.json", state(global_step="4"), "trainer_state.json is damaged"),
    "a log of text": ("trainer_state.json", state(log_history="x"), "trainer_state.json is damaged"),
    "a log without rates": (
        "trainer_state.json",
        state(log_history=[{"loss": 1.0, "step": 1}]),
        "trainer_state.json is damaged",
    ),
    "nothing of ours": ("trainer_state.json", state(stateful_callbacks={}), "trainer_state.json is damaged"),
    "garbage of the optimizer": ("optimizer.pt", GARBAGE, "optimizer.pt is damaged"),
    "garbage of the schedule": ("scheduler.pt", GARBAGE, "scheduler.pt is damaged"),
    "garbage of random states": ("rng_state.pth", GARBAGE, "rng_state.pth is damaged"),
    "garbage of weights": ("model.safetensors", GARBAGE, "SafetensorError"),
    "nothing of the optimizer": ("optimizer.pt", saved({}), "KeyError"),
    "other shapes of the optimizer": ("optimizer.pt", shortened, "its optimizer has exp_avg of shape"),
    "nothing of the schedule": ("scheduler.pt", saved({}), "KeyError"),
    "the schedule begun anew": ("scheduler.pt", rewound, "its learning rate is of step 0"),
    "nothing of random states": ("rng_state.pth", saved({}), "KeyError"),
    "a tensor less": ("model.safetensors", without, "model.layers.1.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("case", daily(FORGED, *[*FORGED][::4]))
def test_a_damaged_checkpoint_is_refused_in_one_line(case, stopped):
    name, content, message = FORGED[case]
    forge(stopped / "checkpoint-4", name, content)
    with pytest.raises(ValueError, match=f"^checkpoint-4 cannot be resumed: .*{re.escape(message)}") as error:
        trainer_of(stopped).train(True)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert list(checkpoints(stopped)) == [2, 4]


def test_a_later_failure_is_not_blamed_on_the_checkpoint(stopped, monkeypatch):
    """Only errors before the end of the first step are attributed to the checkpoint."""
    original = CrossLayerTrainer.training_step

    def fail(self, *args):
        if self.state.global_step == 5:
            raise KeyError("ours")
        return original(self, *args)

    monkeypatch.setattr(CrossLayerTrainer, "training_step", fail)
    with pytest.raises(KeyError, match="ours"):
        trainer_of(stopped).train(True)


BATCHES = {
    (4, 2, 1): "set train.gradient_accumulation_steps=1$",
    (2, 1, 1): "set train.gradient_accumulation_steps=2$",
    (1, 8, 1): "set train.gradient_accumulation_steps=4$",
    (4, 1, 2): "since 2 x 4 does not divide 4$",
    (2, 2, 2): "set train.gradient_accumulation_steps=1$",
    (3, 1, 1): "since 1 x 3 does not divide 4$",
}


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_another_batch_is_refused_with_the_accumulation_that_keeps_it(batch, stopped, monkeypatch):
    size, accumulated, processes = batch
    more = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
    trainer = trainer_of(stopped, data=Random(STEPS * 16), **more)
    monkeypatch.setattr(type(trainer.args), "world_size", processes)
    sequences = size * accumulated * processes
    message = f"must be 4 sequences per step as in checkpoint-4, got {sequences}; .*{BATCHES[batch]}"
    with pytest.raises(ValueError, match=message):
        trainer.train(True)


def test_a_batch_that_makes_a_run_shorter_than_the_checkpoint_is_named_first(stopped):
    """With twice the batch a run by tokens has half the steps; the error must be about the batch, not the step."""
    trainer = trainer_of(stopped, data=Random(STEPS * 16), schedule=course(3), gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"got 8; set train\.gradient_accumulation_steps=1"):
        trainer.train(True)


@pytest.mark.parametrize("more", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}], ids=str)
def test_the_same_batch_resumes_also_between_two_logged_steps(more, tmp_path):
    """A logged loss is the mean since the previous entry, also across a checkpoint."""
    runs = {}
    for name, stop in (("whole", None), ("parts", 5)):
        trainer = trainer_of(tmp_path / name, model_of(attention_dropout=0.0), logging_steps=3)
        if stop is not None:
            trainer.add_callback(Stop(stop))
        trainer.train()
        runs[name] = trainer
    runs["parts"] = trainer_of(
        tmp_path / "parts", model_of(attention_dropout=0.0), Random(STEPS * 4), logging_steps=3, **more
    )
    runs["parts"].train(True)
    expected = losses(runs["whole"])
    assert list(expected) == [3, 6, 8]
    assert losses(runs["parts"]) == (pytest.approx(expected, rel=1e-5) if more else expected)

"""The trainer: what decays, the learning rate, exact losses, exact resuming, the log, and the model it leaves."""

import copy
import json
import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from crosslayer import testing as contract
from crosslayer.decoder import CrossLayerForCausalLM
from crosslayer.training.arguments import Schedule, training_arguments
from crosslayer.training.checkpoints import checkpoints
from crosslayer.training.trainer import TrainingStopped
from tests.decoder.test_every_method import CASES
from tests.helpers.training import LENGTH, STEPS, Random, Stop, losses, model_of, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*use_reentrant.*")


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from start to end: its trainer and folder."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_of(folder, gradient_accumulation_steps=2, data=Random(STEPS * 8))
    trainer.train()
    return trainer, folder


@pytest.mark.parametrize("stops", [(1,), (2,), (5,), (3, 6), (2, 7)], ids=str)
def test_a_resumed_run_has_the_same_losses_bit_for_bit(stops, whole, tmp_path):
    """With dropout, clipping, accumulation, a warm-up; from the last checkpoint before the stop, or from the start."""
    for stop in (*stops, None):
        trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, data=Random(STEPS * 8))
        if stop is not None:
            trainer.add_callback(Stop(stop))
        trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == losses(whole[0])
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, whole[0].model.get_parameter(name)), name
    kept = ("step", "loss", "grad_norm", "learning_rate", "tokens", "eval_a_loss")
    lines = [[{key: line.get(key) for key in kept} for line in log_of(folder)] for folder in (tmp_path, whole[1])]
    assert lines[0] == lines[1]

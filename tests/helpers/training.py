"""Small training runs: random ids, a tiny decoder, a trainer, a recipe."""

import copy

import torch
import yaml
from torch.utils.data import Dataset
from transformers import TrainerCallback

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.testing import tiny as contract
from crosslayer.training.arguments import training_arguments
from crosslayer.training.initialise import initialise
from crosslayer.training.recipe_parts import SchedulePart
from crosslayer.training.trainer import CrossLayerTrainer

LENGTH = 12
STEPS = 8
RECIPE = {
    "model": {"size": "tiny", "shape": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}},
    "data": {"length": 32, "domains": [{"name": "books", "weight": 3}, {"name": "code"}]},
    "schedule": {"steps": 6, "warmup": 2},
    "train": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_steps": 2,
        "use_cpu": True,
    },
    "eval": {"every": 4, "windows": 3},
}


def recipe_in(folder, **parts):
    """Save `RECIPE` with other parts, and return its file."""
    path = folder / "little.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **parts}))
    return path


class Random(Dataset):
    """Items of random ids, two documents each, twelve that come again and again; item i is a function of seed and i."""

    def __init__(self, items: int, seed: int = 0):
        self.items, self.seed = items, seed

    def __len__(self):
        return self.items

    def __getitem__(self, i):
        border = 3 + i % 5
        ids = contract.tokens(1, LENGTH, seed=1000 * self.seed + i % 12)[0]
        positions = torch.cat((torch.arange(border), torch.arange(LENGTH - border)))
        labels = ids.clone()
        labels[border] = -100
        return {"input_ids": ids, "position_ids": positions, "labels": labels}


class Stop(TrainerCallback):
    """Ends a run after a step, as an interrupt would, but in order."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def model_of(methods=(), **shape):
    config = contract.config_of(list(methods), **{"num_hidden_layers": 2, "attention_dropout": 0.1, **shape})
    model = CrossLayerForCausalLM(copy.deepcopy(config))
    initialise(model, 0)
    return model


def course(steps, **parts):
    """Return the arguments of a schedule."""
    return SchedulePart(steps=steps, **parts).schedule_arguments(steps)


def trainer_of(folder, model=None, data=None, validation=None, schedule=None, **train):
    train = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2, **train}
    schedule = course(STEPS, warmup=2) if schedule is None else schedule
    arguments = training_arguments(folder, 0, schedule, {"use_cpu": True, **train})
    data = Random(schedule["max_steps"] * arguments.train_batch_size) if data is None else data
    validation = {"a": Random(6, seed=1)} if validation is None else validation
    return CrossLayerTrainer(model_of() if model is None else model, arguments, data, validation)


def losses(trainer):
    """Return the training losses by step."""
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}

"""A run that cannot fit into memory is refused before it starts, and one that fits is not."""

import re
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig

import crosslayer
from crosslayer.training import costs
from crosslayer.training.arguments import training_arguments
from tests.helpers.training import course, recipe_in


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "cache"))
    return recipe_in(tmp_path, schedule={"steps": 1})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.shape.hidden_size=10000000", r"at least [\d,]{9,}.\d GB for [\d,]{18,} parameters"),
        (
            "train.per_device_train_batch_size=100000000",
            r"[\d,]{5,}.\d GB for a batch of 100,000,000 sequences of 32 tokens",
        ),
        ("train.gradient_accumulation_steps=100000000", r"400,000,000 per step"),
    ],
)
def test_the_needed_memory_is_named_in_one_line(recipe, tmp_path, setting, message):
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.train(recipe, tmp_path / "run", settings=[setting])
    assert re.search(r"but [\d.]+ GB are free", str(error.value))


@pytest.mark.slow  # trains a larger model
def test_the_bound_is_between_a_sixth_and_all_of_what_a_run_uses(recipe, tmp_path, monkeypatch):
    settings = ["model.size=mini", "model.shape={}", "data.length=128", "train.per_device_train_batch_size=8"]
    run = crosslayer.train(recipe, tmp_path / "run", settings=settings)
    if run.peak_bytes is None:
        return
    monkeypatch.setattr(costs, "free_memory", lambda device: run.peak_bytes)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # it fits: training begins
        patch.setattr("crosslayer.training.stages.CrossLayerTrainer", mock.Mock(side_effect=KeyboardInterrupt))
        crosslayer.train(recipe, tmp_path / "again", settings=settings)
    monkeypatch.setattr(costs, "free_memory", lambda device: run.peak_bytes / 6)
    with pytest.raises(ValueError, match="training needs"):
        crosslayer.train(recipe, tmp_path / "third", settings=settings)
    start = [f"model={{start: {tmp_path / 'run' / 'model'}}}", *settings[2:]]
    with pytest.raises(ValueError, match="training needs"):
        crosslayer.train(recipe, tmp_path / "fourth", settings=start)


def test_adam_has_two_states_of_a_matrix(tmp_path, monkeypatch):
    model = mock.Mock(**{"parameters.side_effect": torch.nn.Linear(1000, 1000, bias=False, device="meta").parameters})
    model.config = LlamaConfig(vocab_size=1, hidden_size=1, num_hidden_layers=1, num_attention_heads=1)
    plain = {"use_cpu": True, "per_device_train_batch_size": 1}
    monkeypatch.setattr(costs, "free_memory", lambda device: 3.5 * 4 * 1000**2)
    costs.check_memory(model, training_arguments(tmp_path, 0, course(1), {**plain, "optim": "sgd"}), 2)
    with pytest.raises(ValueError, match="0.0 GB.*1,000,000 parameters"):
        costs.check_memory(model, training_arguments(tmp_path, 0, course(1), plain), 2)

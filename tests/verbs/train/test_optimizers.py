"""Optimizers and learning rates of runs: Muon beside AdamW, groups of rates, and how rates rise and fall."""

import copy
from unittest import mock

import pytest
import torch
from torch.optim import AdamW, Muon

from crosslayer.training import arguments as module
from crosslayer.training.arguments import training_arguments
from crosslayer.training.checkpoints import checkpoints
from crosslayer.training.recipe_parts import OptimizerPart, SchedulePart
from tests.helpers.training import Stop, course, model_of, trainer_of

MUON = OptimizerPart(name="muon")
OTHERS = ("embed_tokens", "lm_head", "norm")


def run(folder, optimizer, model=None, **train):
    schedule = train.pop("schedule", course(4))
    trainer = trainer_of(folder, model, schedule=schedule, weight_decay=0.1, **train)
    trainer._optimizer = optimizer
    return trainer


def rates(folder, schedule):
    trainer = trainer_of(folder, schedule=schedule, learning_rate=1.0)
    trainer.create_optimizer_and_scheduler(schedule["max_steps"])
    values = []
    for _ in range(schedule["max_steps"]):
        values.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return values


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"kind": "linear", "warmup": 2, "minimum": 0.5}, [0.5, 0.75, *[1 - 0.5 * n / 6 for n in range(6)]]),
        ({"kind": "linear", "minimum": 0}, [1 - (1 - 1e-4) * n / 8 for n in range(8)]),
        ({"kind": "wsd", "warmup": 2, "minimum": 0.1, "decay": 0.25}, [0.1, 0.55, 1, 1, 1, 1, 1, 0.55]),
        ({"kind": "wsd", "decay": 4, "minimum": 1}, [1.0] * 8),
        ({"warmup": 2, "minimum": 1}, [0.5, *[1.0] * 7]),
    ],
)
def test_rates_rise_from_above_zero_and_fall_as_the_recipe_says(tmp_path, part, expected):
    assert rates(tmp_path, SchedulePart(steps=8, **part).schedule_arguments(8)) == pytest.approx(expected)


def test_a_decay_without_effect_or_too_long_is_refused():
    with pytest.raises(ValueError, match="kind: cosine"):
        SchedulePart(steps=8, decay=4)
    with pytest.raises(ValueError, match="6 steps.*7"):
        SchedulePart(tokens=8, kind="wsd", warmup=2, decay=7).schedule_arguments(8)


def test_matrices_are_trained_by_torchs_muon_and_the_rest_by_adamw(tmp_path):
    model = model_of(["resformer", "attnres"])
    trainer = run(tmp_path, MUON, model)
    trainer.create_optimizer()
    naive = copy.deepcopy(model)
    named = dict(naive.named_parameters())
    matrices = {name for name in named if named[name].ndim == 2 and "proj" in name}
    assert len(matrices) == 2 * 7 and all(other in " ".join(named.keys() - matrices) for other in OTHERS)
    muon = Muon([named[name] for name in matrices], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    decayed = set(trainer.get_decay_parameter_names(model))
    rest = [
        {"params": [named[name]], "weight_decay": 0.1 if name in decayed else 0.0} for name in named.keys() - matrices
    ]
    adamw = AdamW(rest, lr=1e-2)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            named[name].grad = parameter.grad.clone()
        trainer.optimizer.step()
        muon.step()
        adamw.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_a_run_by_muon_resumes_bit_for_bit(tmp_path):
    whole = run(tmp_path / "whole", MUON)
    whole.train()
    stopped = run(tmp_path / "stopped", MUON)
    stopped.add_callback(Stop(2))
    stopped.train()
    assert list(checkpoints(tmp_path / "stopped")) == [2]
    resumed = run(tmp_path / "stopped", MUON)
    resumed.train(resume_from_checkpoint=True)
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name


@pytest.mark.parametrize("name", [None, "muon"])
def test_rates_are_multiplied_by_the_factor_of_the_first_matching_expression(tmp_path, name):
    part = OptimizerPart(name=name, rates={"embed_tokens": 3.0, r"layers\.1\.": 0.5, "mlp": 2.0})
    trainer = run(tmp_path, part)
    optimizer = trainer.create_optimizer()
    by_parameter = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        factor = 3.0 if "embed" in name else 0.5 if "layers.1." in name else 2.0 if "mlp" in name else 1.0
        assert by_parameter.pop(id(parameter)) == pytest.approx(1e-2 * factor), name
    assert not by_parameter


def test_rates_without_effect_are_refused(tmp_path):
    trainer = run(tmp_path, OptimizerPart(rates={"embed": 2.0, "embed_tokens": 3.0}))
    with pytest.raises(ValueError, match="optimizer.rates: 'embed_tokens'"):
        trainer.create_optimizer()
    with pytest.raises(ValueError, match="regular expression"):
        OptimizerPart(rates={"(": 1.0})
    with pytest.raises(ValueError, match="greater than 0"):
        OptimizerPart(rates={"a": 0.0})


def test_bfloat16_is_on_by_itself_where_the_gpu_has_it(tmp_path, monkeypatch):
    assert not training_arguments(tmp_path, 0, course(1), {"use_cpu": True}).bf16
    passed = {}
    accepted = mock.Mock(n_gpu=1, dataloader_num_workers=0)
    monkeypatch.setattr(module, "TrainingArguments", lambda **options: passed.update(options) or accepted)
    for has, train, expected in (
        (True, {}, True),
        (False, {}, False),
        (True, {"fp16": True}, False),
        (True, {"bf16": False}, False),
        (True, {"use_cpu": True}, False),
    ):
        monkeypatch.setattr(module, "has_bfloat16", lambda has=has: has)
        training_arguments(tmp_path, 0, course(1), {"use_cpu": False, **train})
        assert passed["bf16"] is expected

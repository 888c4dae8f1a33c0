"""How learning rates rise and fall, and when a run computes in bfloat16."""

from unittest import mock

import pytest
import torch

from crosslayer.training import arguments as module
from crosslayer.training.arguments import training_arguments
from crosslayer.training.recipe_parts import SchedulePart
from tests.helpers.training import course, trainer_of


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
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        training_arguments(tmp_path, 0, course(1), {"use_cpu": False, **train})
        assert passed["bf16"] is expected

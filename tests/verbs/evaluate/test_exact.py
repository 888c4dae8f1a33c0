"""Scores are those of lm-eval's own `hf` model on the same files, digit by digit, and item by item."""

import copy
import random
import weakref

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.judge.tasks import harness
from crosslayer.models import pair as loading
from crosslayer.models.embedded import embedded_folder
from crosslayer.output.progress import metered_by
from tests.helpers.meters import Recorder

NAMES = ("arc_easy_local", "piqa_local", "lambada_openai_local", "wikitext2_local", "blimp_local", "winogrande_local")


def by_harness(folder, names, tasks, **options):
    """What lm-eval itself returns for a folder."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    with harness.quiet():
        return simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=list(names),
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            device="cpu",
            **options,
        )


def check_equal(ours, theirs):
    for part in ("results", "groups", "n-shot", "versions", "higher_is_better", "n-samples", "group_subtasks"):
        assert ours.get(part) == theirs.get(part), part
    assert ours["samples"].keys() == theirs["samples"].keys()
    for task, samples in theirs["samples"].items():
        assert samples and ours["samples"][task] == samples, task


@pytest.mark.parametrize("shots", [None, 2])
def test_a_tiny_model_scores_to_the_digit_as_in_the_harness(pair, tasks, shots):
    names = NAMES if shots is None else NAMES[:2]
    evaluation = crosslayer.evaluate(
        pair[0], tasks=names, include_path=tasks, allow_code=True, batch=4, num_fewshot=shots, device="cpu"
    )
    theirs = by_harness(pair[0], names, tasks, batch_size=4, num_fewshot=shots)
    check_equal(evaluation.lm_eval_results["candidate"], theirs)
    assert len(evaluation.tasks) == (12 if shots is None else 4)
    for row in evaluation.tasks:
        assert row.value == theirs["results"][row.scope][f"{row.quantity},none"]
    if shots is None:
        found = {row.scope: row for row in evaluation.groups}["blimp_local"]
        assert found.value == pytest.approx(theirs["groups"]["blimp_local"]["acc,none"])


@pytest.mark.slow
def test_smollm2_scores_to_the_digit_as_in_the_harness(tasks):
    names = ("arc_easy_local", "piqa_local")
    evaluation = crosslayer.evaluate("smollm2", tasks=names, include_path=tasks, allow_code=True, batch=4, device="cpu")
    check_equal(
        evaluation.lm_eval_results["candidate"], by_harness(embedded_folder("smollm2"), names, tasks, batch_size=4)
    )


def test_nothing_of_the_process_changes(monkeypatch, pair, tasks, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)  # where git finds no repository, and says so
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    meter = Recorder()
    with metered_by(meter):
        crosslayer.evaluate(pair[0], tasks=["piqa_local", "wikitext2_local"], include_path=tasks, allow_code=True)
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    works = dict(meter.works)
    assert works["scoring answers"] == 28 and works["scoring windows of text"] == 9
    assert (28, 28, "") in meter.steps and (9, 9, "") in meter.steps


@pytest.mark.slow  # runs the tasks three times
def test_a_model_in_memory_and_its_batch_change_nothing_that_counts(pair, tasks):
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    model.train()
    before = copy.deepcopy(model.state_dict())
    options = {"tasks": "arc_easy_local,lambada_openai_local", "include_path": tasks, "allow_code": True}
    loaded = crosslayer.evaluate(model, tokenizer, baseline=model, **options)
    assert model.training and all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    named = crosslayer.evaluate(pair[0], device="cpu", batch=1, **options)
    scores = [[row.value for row in one.rows] for one in (loaded, named)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert all(row.change.verdict == "no difference seen" and row.is_better is None for row in loaded.rows)
    assert all(row.original is None and row.change is None for row in named.rows)


def test_only_one_of_two_models_is_held_at_a_time(monkeypatch, pair, tasks):
    load, held = loading.load_model, []

    def watched(name, **options):
        assert not any(reference() for reference in held)
        model, tokenizer = load(name, **options)
        held.append(weakref.ref(model))
        return model, tokenizer

    monkeypatch.setattr(loading, "load_model", watched)
    crosslayer.evaluate(pair[0], baseline=pair[1], tasks="piqa_local", include_path=tasks, allow_code=True, limit=2)
    assert len(held) == 2

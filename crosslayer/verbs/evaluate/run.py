"""Scores of a model on tasks of lm-eval, beside a baseline on the same items."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.eviction.running import evicting_if
from crosslayer.models.load import Ready
from crosslayer.models.pair import Named, check_causal, pair
from crosslayer.output.progress import Meter, Silent
from crosslayer.probe.intercept import evaluating
from crosslayer.verbs.evaluate import harness, summary
from crosslayer.verbs.evaluate.cost import check_positions, measure_cost
from crosslayer.verbs.evaluate.lm import language_model
from crosslayer.verbs.evaluate.record import ModelFacts, Models, Settings
from crosslayer.verbs.evaluate.result import Evaluation
from crosslayer.verbs.evaluate.templates import sandboxed


def evaluate(
    model: Named,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tasks: str | Sequence[str],
    baseline: Named | None = None,
    include_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch: int | Literal["auto"] = "auto",
    evict: str | None = None,
    cost: bool = False,
    seed: int = 0,
    allow_code: bool = False,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Meter = Silent,
) -> Evaluation:
    """Score a model on tasks of lm-eval; beside a baseline, with paired differences and their intervals.

    Scores are lm-eval's own, by its evaluator. Differences are paired: both models answer the same items.

    Args:
        model: the candidate: hub name, local folder, or smollm2 (embedded). In Python also a loaded model.
        tokenizer: in Python, of models that are loaded.
        tasks: tasks of lm-eval with commas between, or groups of them as papers have them (docs/verbs/evaluate.md).
        baseline: a model to compare with, item by item. In Python a loaded one has the tokenizer of `model`.
        include_path: folder of task files of your own; their templates run in a sandbox, for at most 10 s each.
        limit: the first items of each task; default all.
        num_fewshot: examples before each item; default as the task has it.
        batch: requests at once: auto (on a CPU by counting tokens), or a number.
        evict: what the candidate's cache evicts, as h2o:0.4; the baseline's keeps all.
        cost: measure cache and times beside the baseline too.
        seed: seed of the choice of examples; 0 is lm-eval's own choice.
        allow_code: let task files of include_path run Python code that they name.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python for models that are named.
        device: cpu, cuda, …; default the GPU, or the CPU where there is none. In Python for models that are named.
        progress: in Python, shows what is being done.

    Raises:
        ValueError: lm-eval is missing, a task is unknown or its data cannot be had, a model cannot be loaded or is no
            causal LM, or an option is wrong.

    """
    names = tuple(name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks))
    settings = Settings(tasks=names, limit=limit, num_fewshot=num_fewshot, batch=batch, evict=evict, seed=seed)
    version = harness.check_installed()
    if cost and baseline is None:
        raise ValueError("a cost is a ratio to a baseline; name one with baseline=…")
    if cost and model is baseline and isinstance(model, PreTrainedModel):
        raise ValueError("a cost is of two models that run in turns; load the baseline by itself")
    sides = [model] if baseline is None else [model, baseline]
    check_causal("evaluate", sides)
    if cost:
        check_positions(sides)
    with harness.quiet(), sandboxed():
        with progress("reading tasks", 0):
            tasks_by_name = harness.Tasks(names, None if include_path is None else Path(include_path), allow_code)
            loaded_tasks = tasks_by_name.load()
        ready = pair("evaluate", model, baseline, tokenizer, dtype=dtype, device=device, meter=progress)
        evicts = (evict, None)  # the baseline keeps all
        scored = {
            name: _score(side, tasks_by_name, loaded_tasks, settings, evicted, allow_code, progress)
            for name, side, evicted in zip(("candidate", "baseline"), ready, evicts, strict=False)
        }
    measured = measure_cost(ready[0].model, ready[1].model, evict, progress) if cost else None
    return _summed_up(scored, tasks_by_name, settings, version).model_copy(update={"cost": measured})


@dataclass(frozen=True)
class _Scored:
    """A side: what it is, and what lm-eval returned."""

    facts: ModelFacts
    results: dict[str, Any]


def _score(
    side: Ready,
    tasks_by_name: harness.Tasks,
    loaded_tasks: list[Any],
    settings: Settings,
    evict: str | None,
    allow_code: bool,
    progress: Meter,
) -> _Scored:
    """Evaluate a model."""
    model, tokenizer = side.model, side.tokenizer
    assert tokenizer is not None
    started = time.perf_counter()
    with evaluating(model), evicting_if(model, evict) as new_cache:
        lm = language_model(model, tokenizer, settings.batch, progress, evict, new_cache)
        results = harness.score(
            lm,
            loaded_tasks,
            tasks_by_name.manager,
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            seed=settings.seed,
            allow_code=allow_code,
        )
    facts = ModelFacts(
        name=side.name,
        class_=type(model).__name__,
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        seconds=round(time.perf_counter() - started, 3),
        requests=lm.requests,
        shortened=lm.shortened,
        reduced=None if evict is None else lm.reduced,
    )
    return _Scored(facts, results)


def _summed_up(
    scored: Mapping[str, _Scored], tasks_by_name: harness.Tasks, settings: Settings, version: str
) -> Evaluation:
    results = {side: score.results for side, score in scored.items()}
    candidate, baseline = results["candidate"], results.get("baseline")
    rows = summary.rows(candidate, baseline)
    groups = {**summary.harness_groups(candidate), **tasks_by_name.selection.groups}
    evaluation = Evaluation(
        models=Models(
            candidate=scored["candidate"].facts, baseline=scored["baseline"].facts if baseline is not None else None
        ),
        settings=settings,
        rows=rows,
        groups=summary.group_rows(groups, rows, candidate, baseline),
        lm_eval=version,
    )
    return evaluation.with_results(results)

"""Scores of a model on tasks of lm-eval, beside a baseline on the same items."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.eviction.running import evicting_if
from crosslayer.models.pair import Loadable, Named, pair
from crosslayer.output.progress import Meter, Silent
from crosslayer.probe.intercept import evaluating
from crosslayer.probe.tokens import positions
from crosslayer.verbs.bench.record import BenchSettings, Row
from crosslayer.verbs.bench.run import bench_transformers
from crosslayer.verbs.evaluate import harness, summary
from crosslayer.verbs.evaluate.record import EvaluatedModel, EvaluatedModels, EvaluateSettings
from crosslayer.verbs.evaluate.result import Evaluation
from crosslayer.verbs.evaluate.templates import sandboxed

COST_CONTEXT, COST_TOKENS, COST_PAIRS = 512, 16, 5  # of a cost: tokens of the prompt and after it, pairs of runs


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
    settings = EvaluateSettings(tasks=names, limit=limit, num_fewshot=num_fewshot, batch=batch, evict=evict, seed=seed)
    version = harness.check_installed()
    if cost and baseline is None:
        raise ValueError("a cost is a ratio to a baseline; name one with baseline=…")
    if cost and model is baseline and isinstance(model, PreTrainedModel):
        raise ValueError("a cost is of two models that run in turns; load the baseline by itself")
    sides = pair("evaluate", model, baseline, tokenizer, dtype=dtype, device=device)
    if cost:
        cost_context(side.positions for side in sides)
    with harness.quiet(), sandboxed(), progress("reading tasks", 0):  # reading renders templates, too
        chosen = harness.Tasks(names, None if include_path is None else Path(include_path), allow_code)
    models, results = [], []
    for side, evicted in zip(sides, (evict, None), strict=False):  # the baseline keeps all
        facts, returned = _score(side, chosen, settings, evicted, progress)
        models.append(facts)
        results.append(returned)
    other = results[1] if len(results) > 1 else None
    rows = summary.rows(results[0], other)
    evaluation = Evaluation(
        models=EvaluatedModels(candidate=models[0], baseline=None if other is None else models[1]),
        settings=settings,
        rows=rows,
        groups=summary.group_rows(chosen.groups, rows, results[0], other),
        cost=measure_cost(sides[0].load(progress), sides[1].load(progress), evict, progress) if cost else None,
        lm_eval=version,
    )
    evaluation.lm_eval_results.update(zip(("candidate", "baseline"), results, strict=False))
    return evaluation


def _score(
    side: Loadable, tasks: harness.Tasks, settings: EvaluateSettings, evict: str | None, progress: Meter
) -> tuple[EvaluatedModel, dict[str, Any]]:
    """Load a model, evaluate it and let it go; return what it is, and what lm-eval returned."""
    from crosslayer.verbs.evaluate.lm import language_model

    model = side.load(progress)
    started = time.perf_counter()
    with harness.quiet(), sandboxed(), evaluating(model), evicting_if(model, evict) as new_cache:
        lm = language_model(model, side.tokenizer, settings.batch, progress, evict, new_cache)
        results = harness.score(lm, tasks, settings)
    facts = EvaluatedModel(
        **side.facts(model),
        seconds=round(time.perf_counter() - started, 3),
        requests=lm.requests,
        shortened=lm.shortened,
        reduced=None if evict is None else lm.reduced,
    )
    return facts, results


def measure_cost(candidate: PreTrainedModel, baseline: PreTrainedModel, evict: str | None, progress: Meter) -> Row:
    """Return what the candidate's cache and time are beside the baseline's, so that they stand beside its scores."""
    context = cost_context(map(positions, (candidate, baseline)))
    settings = BenchSettings(contexts=(context,), new_tokens=COST_TOKENS, repeats=COST_PAIRS, evict=evict)
    return bench_transformers(candidate, baseline, settings, progress=progress).rows[0]


def cost_context(limits: Iterable[int]) -> int:
    """Return how many tokens of a prompt have a place among the positions of all models, with what follows them."""
    least = min(limits)
    if least <= COST_TOKENS:
        raise ValueError(f"a cost is measured over {COST_TOKENS} new tokens; a model has {least} positions")
    return min(COST_CONTEXT, least - COST_TOKENS)

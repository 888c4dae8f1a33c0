"""Scores of a model on tasks of lm-eval, beside a baseline on the same items."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.environment import environment
from crosslayer.evaluation import harness, summary
from crosslayer.evaluation.cost import measure_cost
from crosslayer.evaluation.lm import language_model
from crosslayer.evaluation.record import ModelFacts, Models, Settings
from crosslayer.evaluation.result import Evaluation
from crosslayer.eviction.running import evicting_if
from crosslayer.models.load import is_causal, load_config, model_source, public_name, ready_model
from crosslayer.output.progress import Meter, Silent
from crosslayer.output.record import Environment
from crosslayer.probe.intercept import evaluating

Named = PreTrainedModel | str | Path


def evaluate(
    model: Named,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tasks: Sequence[str] | str,
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
    """Score a causal language model on tasks of lm-eval, and compare it with a baseline item by item.

    Scores are lm-eval's own, by its evaluator. Differences are paired: both models answer the same items.

    Args:
        model: the candidate: a hub name, a local folder or an embedded model; or loaded.
        tokenizer: of models that are loaded.
        tasks: names of lm-eval's tasks, tags and groups, or of our groups (`crosslayer.evaluation.groups.GROUPS`).
        baseline: what it is compared with, in the same way; None: scores alone.
        include_path: a folder of task files of your own. They are code: their templates run.
        limit: the first items of each task; None: all.
        num_fewshot: examples before each item; None: as the task has it.
        batch: requests at once; "auto" finds it, on a CPU by counting tokens.
        evict: what the candidate's cache evicts, "h2o:0.4" say (see `parse_eviction`); the baseline's keeps all.
        cost: measure cache and times beside the baseline too, so that they stand beside the scores.
        seed: of the choice of examples; 0 is lm-eval's own choice.
        allow_code: let task files of `include_path` run Python code that they name.
        dtype: of models that are named, as `load_model` has it.
        device: likewise.
        progress: shows what is being done.

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
    sides: dict[str, Named] = {"candidate": model} if baseline is None else {"candidate": model, "baseline": baseline}
    _check_names(sides)
    with harness.quiet():
        with progress("reading tasks", 0):
            found = harness.Tasks(names, None if include_path is None else Path(include_path), allow_code)
            loaded = found.load()
        facts, results = {}, {}
        for side, named in sides.items():
            options = _options(named, tokenizer, dtype, device)
            evicted = settings.evict if side == "candidate" else None
            facts[side], results[side] = _scored(named, options, found, loaded, settings, evicted, progress)
    measured = None
    if cost and baseline is not None:
        by_name = {} if all(isinstance(side, PreTrainedModel) for side in sides.values()) else {"dtype": dtype}
        by_name |= {"device": device} if by_name else {}
        measured = measure_cost(model, baseline, evict, by_name, progress)
    return _summed_up(facts, results, found, settings, version).model_copy(update={"cost": measured})


def _check_names(sides: Mapping[str, Named]) -> None:
    """Refuse models that are no causal LMs, or not there, before the first is evaluated."""
    for named in sides.values():
        if isinstance(named, PreTrainedModel):
            _check_kind(named)
            continue
        model_source(str(named))
        config = load_config(str(named))
        if config.is_encoder_decoder or not is_causal(config):
            raise ValueError(f"eval needs a causal LM; {public_name(named)} is none")


def _check_kind(model: PreTrainedModel) -> None:
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"eval needs a causal LM; {type(model).__name__} is none")


def _options(
    named: Named,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
) -> dict[str, Any]:
    """Return what `ready_model` takes with a model: a tokenizer if it is loaded, else dtype and device."""
    if not isinstance(named, PreTrainedModel):
        return {"dtype": dtype, "device": device}
    if tokenizer is None:
        raise ValueError("a model that is loaded needs tokenizer=…, its own")
    return {"tokenizer": tokenizer}


def _scored(
    named: Named,
    options: dict[str, Any],
    found: harness.Tasks,
    loaded: list[Any],
    settings: Settings,
    evict: str | None,
    progress: Meter,
) -> tuple[ModelFacts, dict[str, Any]]:
    """Load a model, if it is named, evaluate it, and let it go."""
    ready = ready_model(named, **options, meter=progress)
    model, tokenizer = ready.model, ready.tokenizer
    assert tokenizer is not None  # one that is named brings its own
    _check_kind(model)
    started = time.perf_counter()
    with evaluating(model), evicting_if(model, evict) as new_cache:
        results = harness.score(
            language_model(model, tokenizer, settings.batch, progress, evict, new_cache),
            loaded,
            found.manager,
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            seed=settings.seed,
        )
    facts = ModelFacts(
        name=ready.name,
        class_=type(model).__name__,
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        seconds=round(time.perf_counter() - started, 3),
    )
    return facts, results


def _summed_up(
    facts: dict[str, ModelFacts],
    results: dict[str, dict[str, Any]],
    found: harness.Tasks,
    settings: Settings,
    version: str,
) -> Evaluation:
    candidate, baseline = results["candidate"], results.get("baseline")
    rows = summary.rows(candidate, baseline)
    groups = {**summary.harness_groups(candidate), **found.selection.groups}
    evaluation = Evaluation(
        models=Models(candidate=facts["candidate"], baseline=facts.get("baseline")),
        settings=settings,
        rows=rows,
        groups=summary.group_rows(groups, rows, candidate, baseline),
        lm_eval=version,
        environment=Environment.model_validate(environment()),
    )
    return evaluation.with_results(results)

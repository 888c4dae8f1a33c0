"""Scores a model on lm-eval tasks and compares it with a baseline on the same items."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.cache.running import CacheOptions
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.judge import Judge
from crosslayer.judge.report import JudgedModel
from crosslayer.judge.tasks import harness, summary
from crosslayer.models.pair import Loadable, Named, pair
from crosslayer.output.progress import progress
from crosslayer.verbs.evaluate.result import EvaluateSettings, Evaluation
from crosslayer.verbs.serve.engine import Served, check_engine, servable, vllm_environment


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
    kv_bits: str | None = None,
    engine: str = "transformers",
    seed: int = 0,
    allow_code: bool = False,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Evaluation:
    """Score a model on lm-eval tasks; with a baseline, also give paired differences with intervals.

    lm-eval itself computes the scores. Differences are paired: both models answer the same items.

    Args:
        model: the candidate: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        tokenizer: in Python, tokenizer of loaded models.
        tasks: comma-separated lm-eval tasks, or groups of tasks as in papers (docs/guides/measure.md).
        baseline: a model to compare with, item by item. In Python a loaded one uses the tokenizer of `model`.
        include_path: folder with your own task files; needs --allow-code.
        limit: use only the first N items of each task; default: all.
        num_fewshot: examples before each item; default: set by the task.
        batch: batch size: auto (on a CPU computed from the number of tokens), or a number.
        evict: eviction policy of the candidate's KV cache, such as h2o:0.4; the baseline keeps all tokens.
        kv_bits: bits of the candidate's KV cache: 8, 4, 3, 2, fp8, or by layer, such as 8@0-11,4@12-29.
        engine: engine that runs the models: transformers, or vllm, which truncates long texts (docs/guides/serve.md).
        seed: seed for few-shot examples; 0 is lm-eval's default.
        allow_code: run the code in include_path, and tasks of lm-eval that execute a model's output.
        dtype: float32, bfloat16, …; default: float32 on a CPU. In Python only for models given by name or path.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only for models given by name or path.

    Raises:
        ValueError: lm-eval is missing, a task is unknown or its data is unavailable, a model cannot be loaded or is not
            a causal LM, or an option is wrong.
    """
    names = harness.task_names(tasks)
    if engine not in ("transformers", "vllm"):
        raise ValueError(f"`engine` must be transformers or vllm, got {engine!r}")
    if engine == "vllm" and (evict, kv_bits, device) != (None, None, None):
        raise ValueError("`evict`, `kv_bits` and `device` need `engine` transformers; leave them out with vllm")
    settings = EvaluateSettings.of(
        tasks=names,
        limit=limit,
        num_fewshot=num_fewshot,
        batch=batch,
        evict=evict,
        kv_bits=kv_bits,
        engine=engine,
        seed=seed,
    )
    version = harness.check_installed()
    sources = pair("evaluate", model, baseline, tokenizer, dtype=dtype, device=device)
    served = [servable_source(source) for source in sources] if engine == "vllm" else []
    started = time.perf_counter()
    chosen = harness.read_tasks(names, None if include_path is None else Path(include_path), allow_code)
    scoring = settings.model_dump(include={"limit", "num_fewshot", "seed"})
    models: list[JudgedModel] = []
    results: list[Any] = []
    # One after the other, so that only one of the models is in memory.
    for index, source in enumerate(sources):
        if engine == "vllm":
            described, returned = _score_served(source, served[index], chosen, settings, scoring)
        else:
            # The baseline keeps its own cache.
            cache = CacheOptions() if index else CacheOptions(evict, settings.kv_bits)
            judge = Judge(source.load(), tokenizer=source.tokenizer, catches=False)
            candidate = Candidate(cache.named(source.name), around=cache.running)
            returned = judge.task_results(candidate, chosen, batch=settings.batch, **scoring)
            described = judge.described(candidate)
            del judge
        models.append(described)
        results.append(returned)
    original, of_original = (models[1], results[1]) if len(models) > 1 else (None, None)
    scored = summary.task_rows(models[0].name, results[0], of_original)
    rows = [*summary.group_rows(chosen.groups, scored, results[0]), *(metric.row for metric in scored)]
    evaluation = Evaluation(
        original=original,
        candidates=(models[0],),
        rows=tuple(rows),
        settings=settings,
        lm_eval=version,
        seconds=round(time.perf_counter() - started, 3),
    )
    evaluation.lm_eval_results.update(zip(("candidate", "baseline"), results, strict=False))
    return evaluation


def servable_source(source: Loadable) -> Served:
    """Return a model that vLLM can open, which must be named."""
    if isinstance(source.source, PreTrainedModel):
        raise ValueError("`engine` vllm opens models by itself; give a name or a folder, not a loaded model")
    check_engine()
    dtype = None if source.dtype is None else str(source.dtype).removeprefix("torch.")
    return servable(str(source.source), kv_memory=None, length=None, dtype=dtype)


def _score_served(
    source: Loadable, served: Served, tasks: harness.Tasks, settings: EvaluateSettings, scoring: dict[str, Any]
) -> tuple[JudgedModel, dict[str, Any]]:
    """Evaluate a model in vLLM; return what is known of it, and what lm-eval returned."""
    with harness.quiet(), vllm_environment():
        # Here, since the module needs vLLM, which looks at its environment when it is imported.
        from crosslayer.verbs.evaluate.served import served_model

        with served_model(source, served, settings) as (lm, facts):
            started = time.perf_counter()
            with progress("answering in vLLM", 0):
                results = harness.score(lm, tasks, **scoring)
            seconds = round(time.perf_counter() - started, 3)
    details = {"requests": lm.requests, "shortened": lm.shortened, "seconds": seconds}
    return JudgedModel(name=source.name, model=facts, details=details), results

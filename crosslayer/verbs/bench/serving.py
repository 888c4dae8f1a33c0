"""KV cache capacity and throughput of two models in vLLM, compared in one run."""

import itertools
import time
from contextlib import ExitStack
from typing import Any

import torch

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.judge.report import JudgedModel, Row
from crosslayer.judge.rows import count_ratio
from crosslayer.output.progress import progress
from crosslayer.stats.times import compare_times
from crosslayer.verbs.bench.serving_result import ServingBenchmark, ServingSettings
from crosslayer.verbs.serve.caches import not_saved
from crosslayer.verbs.serve.engine import GIB, Served, check_engine, servable, vllm_environment

ROLES = ("candidate", "baseline")
GPU_SHARE = 0.45  # fraction of GPU memory for each of the two engines


def bench_vllm(candidate: Any, baseline: Any, settings: ServingSettings) -> ServingBenchmark:
    """Measure cache capacity in tokens and throughput of two models, in two engines that run alternately."""
    longest = max(settings.contexts) + settings.new_tokens
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(vllm_environment())
        check_engine()
        import vllm  # type: ignore[import-not-found]

        served: dict[str, Served] = {}
        memory = settings.kv_bytes / GIB
        for role, model in zip(ROLES, (candidate, baseline), strict=True):
            served[role] = servable(str(model), kv_memory=memory, length=longest, dtype=settings.dtype)
        engines: dict[str, Any] = {}
        for role in ROLES:
            engines[role] = _started(served[role], settings, longest, stack)
        rows = _measured(engines, served, settings)
        models = {role: _described(served[role], engines[role]) for role in ROLES}
    held = [int(models[role].details["kv_tokens"]) for role in ROLES]
    facts: dict[str, Any] = {"candidate": models["candidate"].name, "better": "higher"}
    capacity = Row(
        quantity="KV cache capacity", unit="tokens", value=held[0], original=held[1], change=count_ratio(*held), **facts
    )
    return ServingBenchmark(
        original=models["baseline"],
        candidates=(models["candidate"],),
        rows=(capacity, *rows),
        settings=settings,
        engine=f"vLLM {vllm.__version__}",
        seconds=time.perf_counter() - started,
    )


def _started(served: Served, settings: ServingSettings, longest: int, stack: ExitStack) -> Any:
    """Start an engine with a model; it shuts down when the stack closes."""
    from vllm import LLM  # type: ignore[import-not-found]

    with progress(f"starting vLLM with {served.name}", 0):
        try:
            engine = LLM(
                served.source,
                dtype=settings.dtype or "auto",
                max_model_len=longest,
                max_num_seqs=max(settings.requests),
                kv_cache_memory_bytes=settings.kv_bytes,
                gpu_memory_utilization=GPU_SHARE,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
                seed=settings.seed,
            )
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"vLLM could not start with {served.name}: {reason} (set VLLM_LOGGING_LEVEL=INFO to see its log)"
            ) from error
    stack.callback(engine.llm_engine.engine_core.shutdown)
    return engine


def _measured(engines: dict[str, Any], served: dict[str, Served], settings: ServingSettings) -> list[Row]:
    """Return a row for each configuration; after a warm-up, candidate and baseline run alternately."""
    from vllm import SamplingParams  # type: ignore[import-not-found]

    vocabulary = min(model.config.get_text_config().vocab_size for model in served.values())
    generator = torch.Generator().manual_seed(settings.seed)
    sampling = SamplingParams(temperature=0, max_tokens=settings.new_tokens, ignore_eos=True, detokenize=False)
    loads = list(itertools.product(settings.contexts, settings.requests))
    total, done = len(loads) * (settings.repeats + 1), itertools.count(1)
    rows = []
    with progress("benchmarking", total) as meter:
        for context, requests in loads:
            times: dict[str, list[float]] = {role: [] for role in ROLES}
            for repeat in range(-1, settings.repeats):  # the first warms up
                ids = torch.randint(0, vocabulary, (requests, context), generator=generator)  # (R, T)
                prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
                for role in ROLES if repeat % 2 else ROLES[::-1]:
                    started = time.perf_counter()
                    engines[role].generate(prompts, sampling, use_tqdm=False)
                    if repeat >= 0:
                        times[role].append(time.perf_counter() - started)
                meter.step(next(done), total)
            found = compare_times(**times)
            tokens, scope = (
                requests * settings.new_tokens,
                f"context {context}, {requests} request{'s' if requests > 1 else ''}",
            )
            facts: dict[str, Any] = {"candidate": served["candidate"].name, "scope": scope}
            took: dict[str, Any] = {"value": found.candidate.median, "original": found.baseline.median}
            speeds: dict[str, Any] = {name: tokens / seconds for name, seconds in took.items()}
            faster = found.change.mapped(lambda ratio: 1 / ratio)
            rows.append(Row(quantity="throughput", unit="tokens/s", change=faster, better="higher", **speeds, **facts))
            rows.append(Row(quantity="time", unit="s", change=found.change, **took, **facts))
    return rows


def _described(served: Served, engine: Any) -> JudgedModel:
    cache, config = engine.llm_engine.vllm_config.cache_config, served.config
    details: dict[str, Any] = {
        "class": (config.architectures or [type(config).__name__])[0],
        "layers": config.get_text_config().num_hidden_layers,
        "kv_blocks": cache.num_gpu_blocks,
        "kv_tokens": cache.kv_cache_size_tokens,
    }
    sentence = not_saved(config) if isinstance(config, CrossLayerConfig) else None
    return JudgedModel(name=served.name, details=details if sentence is None else {**details, "not_saved": sentence})

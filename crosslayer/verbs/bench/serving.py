"""KV-cache capacity and throughput of two models in vLLM, compared in one run."""

import itertools
import time
from contextlib import ExitStack
from typing import Any

import torch

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.output.progress import progress
from crosslayer.stats.times import compare_times
from crosslayer.verbs.bench.record import ROLES, Both, Role, ServedModel, ServingRow, ServingSettings
from crosslayer.verbs.bench.serving_result import ServingBenchmark
from crosslayer.verbs.serve.caches import not_saved
from crosslayer.verbs.serve.engine import GIB, Served, check_engine, servable, vllm_environment

GPU_SHARE = 0.45  # fraction of GPU memory for each of the two engines


def bench_vllm(candidate: Any, baseline: Any, settings: ServingSettings) -> ServingBenchmark:
    """Measure cache capacity in tokens and throughput of two models, in two engines that run alternately."""
    longest = max(settings.contexts) + settings.new_tokens
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(vllm_environment())
        check_engine()
        import vllm  # type: ignore[import-not-found]

        served: dict[Role, Served] = {}
        memory = settings.kv_bytes / GIB
        for role, model in zip(ROLES, (candidate, baseline), strict=True):
            served[role] = servable(str(model), kv_memory=memory, length=longest, dtype=settings.dtype)
        engines: dict[Role, Any] = {}
        for role in ROLES:
            engines[role] = _started(served[role], settings, longest, stack)
        rows = _measured(engines, served, settings)
        models = {role: _facts(served[role], engines[role]) for role in ROLES}
    return ServingBenchmark(
        models=Both(**models),
        settings=settings,
        engine=f"vLLM {vllm.__version__}",
        rows=tuple(rows),
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


def _measured(engines: dict[Role, Any], served: dict[Role, Served], settings: ServingSettings) -> list[ServingRow]:
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
            times: dict[Role, list[float]] = {role: [] for role in ROLES}
            for repeat in range(-1, settings.repeats):  # the first warms up
                ids = torch.randint(0, vocabulary, (requests, context), generator=generator)  # (R, T)
                prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
                for role in ROLES if repeat % 2 else ROLES[::-1]:
                    started = time.perf_counter()
                    engines[role].generate(prompts, sampling, use_tqdm=False)
                    if repeat >= 0:
                        times[role].append(time.perf_counter() - started)
                meter.step(next(done), total)
            compare = compare_times(**times)
            tokens = requests * settings.new_tokens
            speeds = Both(candidate=tokens / compare.candidate.median, baseline=tokens / compare.baseline.median)
            rows.append(ServingRow(context=context, requests=requests, time=compare, tokens_per_second=speeds))
    return rows


def _facts(served: Served, engine: Any) -> ServedModel:
    cache, config = engine.llm_engine.vllm_config.cache_config, served.config
    return ServedModel(
        name=served.name,
        **{"class": (config.architectures or [type(config).__name__])[0]},
        layers=config.get_text_config().num_hidden_layers,
        kv_blocks=cache.num_gpu_blocks,
        kv_tokens=cache.kv_cache_size_tokens,
        not_saved=not_saved(config) if isinstance(config, CrossLayerConfig) else None,
    )

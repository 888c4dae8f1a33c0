"""Tokens held and throughput of two models in vLLM, beside each other in one run."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.methods import allowed_modules
from crosslayer.output.progress import Meter
from crosslayer.stats.ratios import coverage
from crosslayer.verbs.bench.record import SIDES, Both, ServedModel, ServingRow, ServingSettings, Side
from crosslayer.verbs.bench.serving_result import ServingBenchmark
from crosslayer.verbs.bench.summary import compared
from crosslayer.verbs.serve.caches import not_saved
from crosslayer.verbs.serve.engine import GIB, Served, check_engine, servable
from crosslayer.verbs.serve.plugin import ALLOWED

# of vLLM, where the user has not set them: what it logs would hide the result
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}
GPU_SHARE = 0.45  # of its memory, for each of two engines


def bench_vllm(candidate: Any, baseline: Any, settings: ServingSettings, progress: Meter) -> ServingBenchmark:
    """Measure how many tokens the cache holds and the throughput, of two models in two engines that run in turns."""
    longest = max(settings.contexts) + settings.new_tokens
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(_environment())
        check_engine()
        import vllm  # type: ignore[import-not-found]

        served: dict[Side, Served] = {}
        memory = settings.kv_bytes / GIB
        for side, model in zip(SIDES, (candidate, baseline), strict=True):
            served[side] = servable(str(model), kv_memory=memory, length=longest, dtype=settings.dtype)
        engines: dict[Side, Any] = {}
        for side in SIDES:
            engines[side] = _started(served[side], settings, longest, progress, stack)
        rows = _measured(engines, served, settings, progress)
        models = {side: _facts(served[side], engines[side]) for side in SIDES}
    return ServingBenchmark(
        models=Both(**models),
        settings=settings,
        engine=f"vLLM {vllm.__version__}",
        rows=tuple(rows),
        interval_coverage=coverage(settings.repeats),
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _environment() -> Iterator[None]:
    """Let vLLM be quiet, and its processes allow the methods that are allowed here; all is as before afterwards."""
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ}
    with patch.dict(os.environ, quiet | {ALLOWED: ",".join(allowed_modules())}):
        yield


def _started(served: Served, settings: ServingSettings, longest: int, progress: Meter, stack: ExitStack) -> Any:
    """Return an engine with a model in it; it ends with the stack."""
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
                f"vLLM could not start with {served.name}: {reason} (VLLM_LOGGING_LEVEL=INFO shows more)"
            ) from error
    stack.callback(engine.llm_engine.engine_core.shutdown)
    return engine


def _measured(
    engines: dict[Side, Any], served: dict[Side, Served], settings: ServingSettings, progress: Meter
) -> list[ServingRow]:
    """Return a row for each setting; sides run in turns, in an order that alternates, after a warm-up."""
    from vllm import SamplingParams  # type: ignore[import-not-found]

    vocabulary = min(model.config.get_text_config().vocab_size for model in served.values())
    generator = torch.Generator().manual_seed(settings.seed)
    sampling = SamplingParams(temperature=0, max_tokens=settings.new_tokens, ignore_eos=True, detokenize=False)
    loads = list(itertools.product(settings.contexts, settings.requests))
    total, done = len(loads) * (settings.repeats + 1), itertools.count(1)
    rows = []
    with progress("benchmarking", total) as meter:
        for context, requests in loads:
            times: dict[Side, list[float]] = {side: [] for side in SIDES}
            for repeat in range(-1, settings.repeats):  # the first warms up
                ids = torch.randint(0, vocabulary, (requests, context), generator=generator)  # (R, T)
                prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
                for side in SIDES if repeat % 2 else SIDES[::-1]:
                    started = time.perf_counter()
                    engines[side].generate(prompts, sampling, use_tqdm=False)
                    if repeat >= 0:
                        times[side].append(time.perf_counter() - started)
                meter.step(next(done), total)
            compare = compared(times)
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

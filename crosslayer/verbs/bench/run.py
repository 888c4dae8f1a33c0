"""Compares the KV cache, latency and memory of a candidate with those of a baseline.

Candidate and baseline run alternately, so that a pair of runs sees the same machine load. A ratio is the median of
candidate / baseline over pairs, with an interval whose ends are pairs too.
"""

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from crosslayer.core.sixteen_bits import DTYPE
from crosslayer.environment import quiet_transformers
from crosslayer.eviction.running import NewCache, SmallerCache
from crosslayer.models.pair import Named, pair
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import evaluating
from crosslayer.stats.times import StepTime
from crosslayer.verbs.bench.memory import Load, Models, too_large
from crosslayer.verbs.bench.record import (
    ROLES,
    AttentionKind,
    BenchSettings,
    Both,
    MeasuredModel,
    QuantisedBytes,
    Role,
    Row,
    ServingSettings,
    Skip,
)
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.rounds import Rounds, attention_of
from crosslayer.verbs.bench.serving import bench_vllm
from crosslayer.verbs.bench.serving_result import ServingBenchmark
from crosslayer.verbs.serve.engine import memory_bytes
from crosslayer.wiring.read import read_plan

LEARNED = 8  # a table of learned positions may have up to this many rows more than positions


def bench(
    model: Named,
    baseline: Named,
    *,
    contexts: Sequence[int] = (512, 2048),
    batches: Sequence[int] = (1,),
    new_tokens: int = 64,
    repeats: int = 5,
    attention: Sequence[str] = ("sdpa",),
    evict: str | None = None,
    kv_bits: str | None = None,
    engine: str = "transformers",
    kv_memory: float | None = None,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Benchmark | ServingBenchmark:
    """Compare KV cache size, time to first token, time per token and peak memory of a model with a baseline.

    Args:
        model: the candidate: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        baseline: the model to compare with, given like `model`.
        contexts: prompt lengths in tokens.
        batches: batch sizes; with vLLM, numbers of concurrent requests.
        new_tokens: tokens to decode after the prompt.
        repeats: pairs of runs; an interval needs at least 5.
        attention: attention implementations of both models: sdpa (flash on a GPU), eager, or both, as sdpa,eager.
        evict: eviction policy of the candidate's KV cache, such as h2o:0.4; the baseline keeps all tokens.
        kv_bits: bits of the candidate's KV cache: 8, 4, 3, 2, fp8, or by layer, such as 8@0-11,4@12-29.
        engine: engine that runs both models: transformers or vllm.
        kv_memory: GiB for each model's KV cache in vLLM; default 1.
        seed: seed of the random tokens.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python only for models given by name or path; default
            that of the other model if it is loaded.
        device: cpu, cuda, …; default the GPU if there is one. In Python only for models given by name or path.

    Raises:
        ValueError: an option is wrong, a model cannot be loaded, is not a causal language model or has fewer positions
            than a context, or nothing fits in memory.

    """
    options: dict[str, Any] = {"contexts": contexts, "new_tokens": new_tokens, "repeats": repeats, "seed": seed}
    if engine == "vllm":
        if device is not None or tuple(attention) != ("sdpa",) or evict is not None or kv_bits is not None:
            raise ValueError(
                "`device`, `attention`, `evict` and `kv_bits` need `engine` transformers; leave them out with vllm"
            )
        options |= {"requests": batches, "dtype": dtype}
        options |= {"kv_bytes": memory_bytes(1.0 if kv_memory is None else kv_memory)}
        return bench_vllm(model, baseline, ServingSettings(**options))
    if engine != "transformers":
        raise ValueError(f"`engine` must be transformers or vllm, got {engine!r}")
    if kv_memory is not None:
        raise ValueError("`kv_memory` needs `engine` vllm; transformers allocates the cache as it grows")
    options |= {"batches": batches, "attention": attention, "evict": evict, "kv_bits": kv_bits}
    return bench_transformers(model, baseline, BenchSettings(**options), dtype, device)


def bench_transformers(
    model: Named,
    baseline: Named,
    settings: BenchSettings,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Benchmark:
    """Compare two models with transformers, in this process; for options and errors see `bench`."""
    smaller = SmallerCache(settings.evict, settings.kv_bits)
    if smaller != SmallerCache() and model is baseline and isinstance(model, PreTrainedModel):
        raise ValueError("`evict` and `kv_bits` change the candidate while it runs; load the baseline separately")
    sources = pair("bench", model, baseline, dtype=dtype, device=device, needs_tokenizer=False)
    models: dict[Role, PreTrainedModel] = {}
    for role, source in zip(ROLES, sources, strict=True):
        models[role] = source.load()
    _check(models, settings)
    started = time.perf_counter()
    rows, skipped = [], []
    with torch.no_grad(), quiet_transformers(), ExitStack() as stack:
        for one in models.values():
            stack.enter_context(evaluating(one))
        for attention in settings.attention:
            with attention_of(models, attention), smaller.running(models["candidate"]) as new_cache:
                measured = _measured(models, new_cache, settings, attention)
            rows, skipped = rows + measured[0], skipped + measured[1]
    if not rows:
        raise ValueError(f"nothing was measured: {skipped[0].reason}")
    facts = {}
    for source, cache, (role, one) in zip(sources, (smaller, SmallerCache()), models.items(), strict=True):
        size = sum(parameter.numel() * parameter.element_size() for parameter in one.parameters())
        facts[role] = MeasuredModel(**source.facts(one, cache.named), bytes=size)
    return Benchmark(
        models=Both(**facts),
        settings=settings,
        rows=tuple(rows),
        skipped=tuple(skipped),
        seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def step_time(models: Models, context: int, batch: int = 1, steps: int = 18) -> StepTime:
    """Return the time of a decoding step of two models after `context` tokens.

    Raises:
        ValueError: a model has fewer positions, or there is too little memory.

    """
    attention = models["baseline"].config.get_text_config()._attn_implementation
    attention = attention if attention in ("sdpa", "eager") else "sdpa"
    settings = BenchSettings(contexts=(context,), batches=(batch,), new_tokens=steps, repeats=1)
    _check(models, settings)
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(evaluating(model))
        load = Load(context, batch, steps, attention)
        reason = too_large(models, load)
        if reason is not None:
            raise ValueError(reason)
        time = Rounds(models, load, settings).steps()
    return StepTime(context=context, batch=batch, time=time)


def _check(models: Models, settings: BenchSettings) -> None:
    """Refuse contexts beyond the models' positions, and models on different devices."""
    for model in models.values():
        limit, longest = model.config.get_text_config().max_position_embeddings, max(settings.contexts)
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        tables = [table for table in tables if table is not model.get_input_embeddings()]
        learned = any(limit <= table.num_embeddings < limit + LEARNED for table in tables)
        needed = longest + settings.new_tokens if learned else longest  # rotary positions extend, learned ones do not
        if needed > limit:
            extra = f" + {settings.new_tokens} new tokens" if learned else ""
            raise ValueError(f"context {longest}{extra} exceeds the {limit} positions of {type(model).__name__}")
    devices = {model.device for model in models.values()}
    if len(devices) > 1:
        raise ValueError(f"the models are on {' and '.join(map(str, devices))}; both must be on one device")


def quantised_bytes(models: Models, load: Load) -> tuple[QuantisedBytes, ...]:
    """Return what the caches of both models would take if they were quantised; nothing if one of them allows none."""

    def stored(role: Role, kind: str | None) -> int:
        model = models[role]
        return read_plan(model, load.total, DTYPE, kv_dtype=kind, batch=load.batch).stored_bytes

    try:
        whole = stored("baseline", None)
        rows = []
        for kind in ("fp8", "int8", "int4"):
            candidate, baseline = (stored(role, kind) for role in ROLES)
            ratios = {"ratio": candidate / whole, "baseline_ratio": baseline / whole}
            rows.append(QuantisedBytes(kind=kind, candidate=candidate, baseline=baseline, **ratios))
    except ValueError:  # latents, or states of several layers
        return ()
    return tuple(rows)


def _measured(
    models: Models,
    new_cache: NewCache | None,
    settings: BenchSettings,
    attention: AttentionKind,
) -> tuple[list[Row], list[Skip]]:
    """Measure every configuration that fits into memory; `new_cache` makes the candidate's caches if it evicts."""
    sizes = itertools.product(settings.batches, settings.contexts)
    loads = [Load(context, batch, settings.new_tokens, attention) for batch, context in sizes]
    rounds = settings.repeats + 1
    total, done = len(loads) * rounds, itertools.count(1)
    rows, skipped = [], []
    with progress("benchmarking", total) as meter:

        def tick() -> None:
            meter.step(next(done), total)

        for load in loads:
            reason = too_large(models, load, evicts=new_cache is not None)
            if reason is None:
                row = Rounds(models, load, settings, new_cache).run(tick)
                rows.append(row.model_copy(update={"quantised": quantised_bytes(models, load)}))
                continue
            skipped.append(Skip(context=load.context, batch=load.batch, attention=attention, reason=reason))
            for _ in range(rounds):
                tick()
    return rows, skipped

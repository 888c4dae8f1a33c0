"""Compares the KV cache, latency and memory of a candidate with those of a baseline.

Candidate and baseline run alternately, so that a pair of runs sees the same machine load. A ratio is the median of
candidate / baseline over pairs, with an interval whose ends are pairs too.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from crosslayer.cache.running import CacheOptions
from crosslayer.environment import quiet_transformers
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.clock import TIMES, Load, attention_of, random_ids, read_plans, softmax_share, too_large
from crosslayer.judge.judge import Judge
from crosslayer.judge.report import Detail, JudgedModel, Row
from crosslayer.judge.rows import bytes_row, cache_rows, time_rows
from crosslayer.models.load import model_facts
from crosslayer.models.pair import Named, pair
from crosslayer.output.progress import progress
from crosslayer.verbs.bench.result import Benchmark, BenchSettings
from crosslayer.verbs.bench.serving import bench_vllm
from crosslayer.verbs.bench.serving_result import ServingBenchmark, ServingSettings
from crosslayer.verbs.serve.engine import memory_bytes
from crosslayer.wiring.kv_bits import REFERENCE_DTYPE

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
    settings = BenchSettings(**options)
    sources = pair("bench", model, baseline, dtype=dtype, device=device, needs_tokenizer=False)
    candidate, original = (source.load() for source in sources)
    check_positions((candidate, original), settings)
    smaller, started = CacheOptions(evict, settings.kv_bits), time.perf_counter()
    around = None if smaller == CacheOptions() else smaller.running
    judged = Candidate(smaller.named(sources[0].name), candidate, around)
    with quiet_transformers():
        rows, skipped = measure_loads(Judge(original, catches=False), judged, settings)
    if not rows:
        raise ValueError(f"nothing was measured: {skipped[0]}")
    return Benchmark(
        original=_described(sources[1].name, original),
        candidates=(_described(judged.name, candidate),),
        settings=settings,
        rows=tuple(rows),
        skipped=tuple(skipped),
        seconds=time.perf_counter() - started,
    )


def _described(name: str, model: PreTrainedModel) -> JudgedModel:
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return JudgedModel(name=name, model=model_facts(model, name), details={"bytes": size})


def check_positions(models: Sequence[PreTrainedModel], settings: BenchSettings) -> None:
    """Refuse contexts beyond the models' positions, and models on different devices."""
    for model in models:
        limit, longest = model.config.get_text_config().max_position_embeddings, max(settings.contexts)
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        tables = [table for table in tables if table is not model.get_input_embeddings()]
        learned = any(limit <= table.num_embeddings < limit + LEARNED for table in tables)
        needed = longest + settings.new_tokens if learned else longest  # rotary positions extend, learned ones do not
        if needed > limit:
            extra = f" + {settings.new_tokens} new tokens" if learned else ""
            raise ValueError(f"context {longest}{extra} exceeds the {limit} positions of {type(model).__name__}")
    devices = {model.device for model in models}
    if len(devices) > 1:
        raise ValueError(f"both models must be on one device, got {' and '.join(map(str, devices))}")


def measure_loads(judge: Judge, candidate: Candidate, settings: BenchSettings) -> tuple[list[Row], list[str]]:
    """Measure every configuration that fits into memory; return rows, and why others were left out."""
    models = [judge.model_of(candidate), judge.original]
    sizes = itertools.product(settings.attention, settings.batches, settings.contexts)
    loads = [Load(context, batch, settings.new_tokens, attention) for attention, batch, context in sizes]
    rounds, done = settings.repeats + 1, itertools.count(1)
    rows, skipped = [], []
    with progress("benchmarking", len(loads) * rounds) as meter:

        def tick() -> None:
            meter.step(next(done), len(loads) * rounds)

        for load in loads:
            with attention_of(models, load.attention):
                reason = too_large(models, load, evicts=settings.evict is not None or settings.kv_bits is not None)
                if reason is None:
                    rows += _rows(judge, candidate, load, settings, tick)
                    continue
            skipped.append(reason)
            for _ in range(rounds):
                tick()
    return rows, skipped


def _rows(
    judge: Judge, candidate: Candidate, load: Load, settings: BenchSettings, tick: Callable[[], None]
) -> list[Row]:
    """Return the rows of a configuration: bytes of both caches, what a step reads, times, peak memory."""
    models = [judge.model_of(candidate), judge.original]
    ids = random_ids(models, load, settings.seed)
    ((first, *pairs),) = judge.runs([candidate], load, ids, settings.repeats, static=True, tick=tick).values()
    facts: dict[str, Any] = {"candidate": candidate.name, "scope": load.name}
    rows = cache_rows(*first, **facts)
    if candidate.around is None:
        rows += _reads(models, load, facts)
    rows += time_rows(pairs, tuple(TIMES), **facts)
    own, original = (side.peak for side in first)
    reason = own.reason or original.reason
    details: dict[str, Detail] = {} if reason is None else {"reason": reason}
    rows.append(bytes_row("peak memory", own.bytes, original.bytes, details=details, **facts))
    if load.attention == "eager" and candidate.around is None:
        shares = [judge.asked(one, lambda model, _: softmax_share(model, load, ids)) for one in (candidate, None)]
        rows.append(Row(quantity="softmax share", unit="share", value=shares[0], original=shares[1], **facts))
    return rows


def _reads(models: Sequence[PreTrainedModel], load: Load, facts: dict[str, Any]) -> list[Row]:
    """Return the bytes that the last step reads, by the plans, in 16 bits; nothing if a model has no plan."""
    plans, as_stored = read_plans(models, load, REFERENCE_DTYPE), read_plans(models, load)
    if not plans:
        return []
    own, original = (plan.read_bytes for plan in plans)
    details: dict[str, Detail] = {"stored": as_stored[0].read_bytes, "original_stored": as_stored[1].read_bytes}
    return [bytes_row("reads of a step", own, original, details=details, **facts)]

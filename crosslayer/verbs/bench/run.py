"""Compares the KV cache, latency and memory of a candidate with those of a baseline; in vLLM, the throughput.

Candidate and baseline run alternately, so that a pair of runs sees the same machine load. A ratio is the median of
candidate / baseline over pairs, with an interval whose ends are pairs too.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from crosslayer.cache.running import CacheOptions
from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.environment import quiet_transformers
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.clock import Load, random_ids, read_plans, softmax_share, too_large
from crosslayer.judge.judge import Judge
from crosslayer.judge.report import Detail, JudgedModel, Row
from crosslayer.judge.rows import bytes_row, count_ratio
from crosslayer.models.load import model_facts
from crosslayer.models.pair import Named, pair
from crosslayer.output.formatting import plural
from crosslayer.output.progress import progress
from crosslayer.probe.model import attention_of, position_embedding, positions
from crosslayer.stats.times import compare_times
from crosslayer.verbs.bench.result import Benchmark, BenchSettings, ServingBenchmark, ServingSettings
from crosslayer.verbs.serve.caches import not_saved
from crosslayer.verbs.serve.engine import (
    GIB,
    Served,
    check_engine,
    memory_bytes,
    servable,
    starting,
    vllm_environment,
)
from crosslayer.wiring.kv_bits import REFERENCE_DTYPE

ROLES = ("candidate", "baseline")
# Fraction of GPU memory for each of the two engines of vLLM, which stand side by side, so that runs can alternate.
GPU_SHARE = 0.45


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
        kv_memory: GiB for each model's KV cache in vLLM; default: 1.
        seed: seed of the random tokens.
        dtype: float32, bfloat16, …; default: float32 on a CPU. In Python only for models given by name or path;
            default: that of the other model if it is loaded.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only for models given by name or path.

    Raises:
        ValueError: an option is wrong, a model cannot be loaded, is not a causal language model or has fewer positions
            than a context, or nothing fits in memory.
    """
    if engine == "vllm":
        if device is not None or tuple(attention) != ("sdpa",) or evict is not None or kv_bits is not None:
            raise ValueError(
                "`device`, `attention`, `evict` and `kv_bits` need `engine` transformers; leave them out with vllm"
            )
        serving = ServingSettings.of(
            contexts=contexts,
            requests=batches,
            new_tokens=new_tokens,
            repeats=repeats,
            kv_bytes=memory_bytes(1.0 if kv_memory is None else kv_memory),
            dtype=dtype,
            seed=seed,
        )
        return bench_vllm(model, baseline, serving)
    if engine != "transformers":
        raise ValueError(f"`engine` must be transformers or vllm, got {engine!r}")
    if kv_memory is not None:
        raise ValueError("`kv_memory` needs `engine` vllm; transformers allocates the cache as it grows")
    settings = BenchSettings.of(
        contexts=contexts,
        batches=batches,
        new_tokens=new_tokens,
        repeats=repeats,
        attention=attention,
        seed=seed,
        evict=evict,
        kv_bits=kv_bits,
    )
    sources = pair("bench", model, baseline, dtype=dtype, device=device, needs_tokenizer=False)
    candidate, original = (source.load() for source in sources)
    check_positions((candidate, original), settings)
    started = time.perf_counter()
    smaller = CacheOptions(evict, settings.kv_bits)
    around = None if smaller == CacheOptions() else smaller.running
    judged = Candidate(smaller.named(sources[0].name), candidate, around)
    with quiet_transformers():
        rows, skipped = measure_loads(Judge(original, catches=False), judged, settings)
    if not rows:
        raise ValueError(f"nothing was measured: {skipped[0]}")
    described = []
    for name, loaded in ((judged.name, candidate), (sources[1].name, original)):
        size = sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters())
        described.append(JudgedModel(name=name, model=model_facts(loaded, name), details={"bytes": size}))
    return Benchmark(
        original=described[1],
        candidates=(described[0],),
        settings=settings,
        rows=tuple(rows),
        skipped=tuple(skipped),
        seconds=time.perf_counter() - started,
    )


def check_positions(models: Sequence[PreTrainedModel], settings: BenchSettings) -> None:
    """Refuse contexts beyond the models' positions, and models on different devices."""
    longest = max(settings.contexts)
    for model in models:
        limit = positions(model)
        # Rotary positions extend beyond what a model was trained for; a table of learned ones has no more rows.
        learned = position_embedding(model) is not None
        needed = longest + settings.new_tokens if learned else longest
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
    rounds = settings.repeats + 1
    done = itertools.count(1)
    rows: list[Row] = []
    skipped: list[str] = []
    with progress("benchmarking", len(loads) * rounds) as meter:

        def tick() -> None:
            meter.step(next(done), len(loads) * rounds)

        for load in loads:
            with attention_of(models, load.attention):
                # A quantized cache needs masks too, since a token may be exact for only some queries of a prompt.
                reason = too_large(models, load, evicts=settings.evict is not None or settings.kv_bits is not None)
                if reason is None:
                    rows += _rows(judge, candidate, load, settings, tick)
                    continue
            skipped.append(reason)
            # The meter counts all rounds, also those that are left out.
            for _ in range(rounds):
                tick()
    return rows, skipped


def _rows(
    judge: Judge, candidate: Candidate, load: Load, settings: BenchSettings, tick: Callable[[], None]
) -> list[Row]:
    """Return the rows of a configuration: bytes of both caches, what a step reads, times, peak memory."""
    models = [judge.model_of(candidate), judge.original]
    # Random tokens that both vocabularies know: times and bytes do not depend on the text.
    ids = random_ids(models, load, settings.seed)
    scope = f"context {load.context}, batch {load.batch}, {load.attention}"
    facts: dict[str, Any] = {"candidate": candidate.name, "scope": scope}
    rows = judge.at_load([candidate], load, ids, settings.repeats, scope, static=True, tick=tick)
    # Plans, and the model's own attention, say nothing of a smaller cache.
    if candidate.around is not None:
        return rows

    # What the last step reads, in 16 bits and as stored; nothing if a model has no plan.
    plans, stored_plans = read_plans(models, load, REFERENCE_DTYPE), read_plans(models, load)
    if plans:
        read, original = (plan.read_bytes for plan in plans)
        stored, original_stored = (plan.read_bytes for plan in stored_plans)
        details: dict[str, Detail] = {"stored": stored, "original_stored": original_stored}
        rows.append(bytes_row("reads of a step", read, original, details=details, **facts))
    if load.attention == "eager":
        shares = [judge.asked(side, lambda model, _: softmax_share(model, load, ids)) for side in (candidate, None)]
        rows.append(Row(quantity="softmax share", unit="share", value=shares[0], original=shares[1], **facts))
    return rows


def bench_vllm(candidate: Any, baseline: Any, settings: ServingSettings) -> ServingBenchmark:
    """Measure cache capacity in tokens and throughput of two models, in two engines that run alternately."""
    longest = max(settings.contexts) + settings.new_tokens
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(vllm_environment())
        check_engine()
        import vllm

        # Both are checked before one of them is started.
        served: dict[str, Served] = {}
        memory = settings.kv_bytes / GIB
        for role, model in zip(ROLES, (candidate, baseline), strict=True):
            served[role] = servable(str(model), kv_memory=memory, length=longest, dtype=settings.dtype)
        engines: dict[str, Any] = {}
        for role in ROLES:
            engines[role] = _started(served[role], settings, longest, stack)
        rows = _throughput(engines, served, settings)
        models: dict[str, JudgedModel] = {}
        for role in ROLES:
            cache, config = engines[role].llm_engine.vllm_config.cache_config, served[role].config
            details: dict[str, Any] = {
                "class": (config.architectures or [type(config).__name__])[0],
                "layers": config.get_text_config().num_hidden_layers,
                "kv_blocks": cache.num_gpu_blocks,
                "kv_tokens": cache.kv_cache_size_tokens,
            }
            # vLLM may store more than the plan does, and the page then says why the capacity is less.
            sentence = not_saved(config) if isinstance(config, CrossLayerConfig) else None
            if sentence is not None:
                details["not_saved"] = sentence
            models[role] = JudgedModel(name=served[role].name, details=details)
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
    from vllm import LLM

    with starting(served):
        engine = LLM(
            served.source,
            dtype=settings.dtype or "auto",
            max_model_len=longest,
            max_num_seqs=max(settings.requests),
            # Equal bytes for both, whatever the weights take, so that the capacity compares the caches alone.
            kv_cache_memory_bytes=settings.kv_bytes,
            gpu_memory_utilization=GPU_SHARE,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            seed=settings.seed,
        )
    stack.callback(engine.llm_engine.engine_core.shutdown)
    return engine


def _throughput(engines: dict[str, Any], served: dict[str, Served], settings: ServingSettings) -> list[Row]:
    """Return a row for each configuration; after a warm-up, candidate and baseline run alternately."""
    from vllm import SamplingParams

    vocabulary = min(model.config.get_text_config().vocab_size for model in served.values())
    generator = torch.Generator().manual_seed(settings.seed)
    # Random text may end anywhere, and both models must decode as many tokens.
    sampling = SamplingParams(temperature=0, max_tokens=settings.new_tokens, ignore_eos=True, detokenize=False)
    loads = list(itertools.product(settings.contexts, settings.requests))
    total, done = len(loads) * (settings.repeats + 1), itertools.count(1)
    rows = []
    with progress("benchmarking", total) as meter:
        for context, requests in loads:
            times: dict[str, list[float]] = {role: [] for role in ROLES}
            # The first pair warms up. Who begins alternates, and each pair has new prompts.
            for repeat in range(-1, settings.repeats):
                ids = torch.randint(0, vocabulary, (requests, context), generator=generator)  # (R, T)
                prompts = [{"prompt_token_ids": prompt} for prompt in ids.tolist()]
                for role in ROLES if repeat % 2 else ROLES[::-1]:
                    started = time.perf_counter()
                    engines[role].generate(prompts, sampling, use_tqdm=False)
                    if repeat >= 0:
                        times[role].append(time.perf_counter() - started)
                meter.step(next(done), total)
            compared = compare_times(**times)
            tokens = requests * settings.new_tokens
            scope = f"context {context}, {plural(requests, 'request')}"
            facts: dict[str, Any] = {"candidate": served["candidate"].name, "scope": scope}
            medians: dict[str, Any] = {"value": compared.candidate.median, "original": compared.baseline.median}
            speeds: dict[str, Any] = {name: tokens / seconds for name, seconds in medians.items()}
            faster = compared.change.mapped(lambda ratio: 1 / ratio)
            rows.append(Row(quantity="throughput", unit="tokens/s", change=faster, better="higher", **speeds, **facts))
            rows.append(Row(quantity="time", unit="s", change=compared.change, **medians, **facts))
    return rows

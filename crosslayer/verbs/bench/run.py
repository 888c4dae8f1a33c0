"""What a candidate costs beside a baseline: cache, time to first token, time per token, memory; measured and predicted.

Both sides run in turns, in an order that alternates, so that a pair meets the same moments of the machine. A ratio is
the median over pairs of candidate / baseline, with an interval whose ends are pairs too.
"""

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from crosslayer.environment import quiet_transformers
from crosslayer.eviction.running import NewCache, evicting_if
from crosslayer.models.pair import Named, pair
from crosslayer.output.progress import Meter, Silent
from crosslayer.probe.intercept import evaluating
from crosslayer.stats.ratios import coverage
from crosslayer.verbs.bench.costs import Load, Structure, structure
from crosslayer.verbs.bench.memory import Models, too_large
from crosslayer.verbs.bench.record import SIDES, BenchSettings, Both, MeasuredModel, Row, ServingSettings, Side, Skip
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.rounds import SideBySide, attention_of
from crosslayer.verbs.bench.serving import bench_vllm
from crosslayer.verbs.bench.serving_result import ServingBenchmark
from crosslayer.verbs.serve.engine import memory_bytes

LEARNED = 8  # a table of learned positions has up to so many rows more than positions


def bench(
    model: Named,
    baseline: Named,
    *,
    contexts: Sequence[int] = (512, 2048),
    batches: Sequence[int] = (1,),
    new_tokens: int = 64,
    repeats: int = 5,
    attention: str = "sdpa",
    evict: str | None = None,
    engine: str = "transformers",
    kv_memory: float | None = None,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Meter = Silent,
) -> Benchmark | ServingBenchmark:
    """Measure cache, time to first token, time per token and memory of a model beside a baseline, in turns.

    Args:
        model: the candidate: hub name, local folder, or smollm2 (embedded). In Python also a loaded model.
        baseline: what it is compared with, named in the same way.
        contexts: lengths of the prompt in tokens.
        batches: batch sizes; in vLLM requests at once.
        new_tokens: tokens to decode after the prompt.
        repeats: pairs of runs; an interval needs three, and five to decide.
        attention: attention of both: sdpa (flash on a GPU) or eager.
        evict: what the candidate's cache evicts, as h2o:0.4; the baseline's keeps all.
        engine: what runs them: transformers or vllm.
        kv_memory: GiB for the KV cache of each in vLLM; default 1.
        seed: seed of the random tokens.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python for models that are named; default that of the
            other if it is loaded.
        device: cpu, cuda, …; default the GPU, or the CPU where there is none. In Python for models that are named.
        progress: in Python, shows what is being done.

    Raises:
        ValueError: an option is wrong, a model cannot be loaded, is no causal language model or has fewer positions
            than a context, or nothing fits in memory.

    """
    asked: dict[str, Any] = {"contexts": contexts, "new_tokens": new_tokens, "repeats": repeats, "seed": seed}
    if engine == "vllm":
        if device is not None or attention != "sdpa" or evict is not None:
            raise ValueError("`device`, `attention` and `evict` are for `engine` transformers; vLLM has its own")
        asked |= {"requests": batches, "dtype": dtype}
        asked |= {"kv_bytes": memory_bytes(1.0 if kv_memory is None else kv_memory)}
        return bench_vllm(model, baseline, ServingSettings(**asked), progress)
    if engine != "transformers":
        raise ValueError(f"`engine` is {engine!r}; it must be transformers or vllm")
    if kv_memory is not None:
        raise ValueError("`kv_memory` is for `engine` vllm; transformers allocates what is needed")
    asked |= {"batches": batches, "attention": attention, "evict": evict}
    return in_turns(model, baseline, BenchSettings(**asked), dtype, device, progress)


def in_turns(
    model: Named,
    baseline: Named,
    settings: BenchSettings,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Meter = Silent,
) -> Benchmark:
    """Measure two models here, in this process, in turns."""
    if settings.evict is not None and model is baseline and isinstance(model, PreTrainedModel):
        raise ValueError("with an eviction candidate and baseline run in turns; load the baseline by itself")
    sides = pair("bench", model, baseline, dtype=dtype, device=device, needs_tokenizer=False)
    models: dict[Side, PreTrainedModel] = {}
    for name, side in zip(SIDES, sides, strict=True):
        models[name] = side.load(progress)
    _check(models, settings)
    started = time.perf_counter()
    structures: dict[Side, Structure] = {}
    reason = None if settings.evict is None else "no prediction: tokens are evicted"
    with torch.no_grad(), quiet_transformers(), ExitStack() as stack:
        for one in models.values():
            stack.enter_context(evaluating(one))
        stack.enter_context(attention_of(models, settings.attention))
        try:
            structures |= {side: structure(models[side]) for side in SIDES}
        except ValueError as error:
            reason = reason or f"no prediction: {error}"
        with evicting_if(models["candidate"], settings.evict) as new_cache:
            rows, skipped = _measured(models, new_cache, structures, settings, progress)
    if not rows:
        raise ValueError(f"nothing was measured: {skipped[0].reason}")
    facts = {}
    for side, (name, one) in zip(sides, models.items(), strict=True):
        size = sum(parameter.numel() * parameter.element_size() for parameter in one.parameters())
        facts[name] = MeasuredModel(**side.facts(one), bytes=size)
    return Benchmark(
        models=Both(**facts),
        settings=settings,
        rows=tuple(rows),
        skipped=tuple(skipped),
        no_prediction=reason,
        interval_coverage=coverage(settings.repeats),
        seconds=time.perf_counter() - started,
    )


def _check(models: Models, settings: BenchSettings) -> None:
    """Refuse what cannot be measured, before anything runs; see `bench`."""
    for model in models.values():
        limit, longest = model.config.get_text_config().max_position_embeddings, max(settings.contexts)
        tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
        tables = [table for table in tables if table is not model.get_input_embeddings()]
        learned = any(limit <= table.num_embeddings < limit + LEARNED for table in tables)
        needed = longest + settings.new_tokens if learned else longest  # rotary positions go on, learned ones end
        if needed > limit:
            extra = f" + {settings.new_tokens} new tokens" if learned else ""
            raise ValueError(f"context {longest}{extra} is above the {limit} positions of {type(model).__name__}")
    devices = {model.device for model in models.values()}
    if len(devices) > 1:
        raise ValueError(f"the models are on {' and '.join(map(str, devices))}; both must be on one device")


def _measured(
    models: Models,
    new_cache: NewCache | None,
    structures: dict[Side, Structure],
    settings: BenchSettings,
    progress: Meter,
) -> tuple[list[Row], list[Skip]]:
    """Measure every setting that fits into memory; `new_cache` makes the candidate's caches, if tokens go."""
    loads = [Load(context, batch, settings.new_tokens) for batch in settings.batches for context in settings.contexts]
    rounds = settings.repeats + 1
    total, done = len(loads) * rounds, itertools.count(1)
    rows, skipped = [], []
    with progress("benchmarking", total) as meter:

        def tick() -> None:
            meter.step(next(done), total)

        for load in loads:
            reason = too_large(models, structures, load, evicts=new_cache is not None)
            if reason is None:
                predicted = structures if new_cache is None else {}
                rows.append(SideBySide(models, predicted, load, settings, new_cache).run(tick))
                continue
            skipped.append(Skip(context=load.context, batch=load.batch, reason=reason))
            for _ in range(rounds):
                tick()
    return rows, skipped

"""One run of a model at a load that fits into memory: a prompt, then decoding steps, with times, bytes and peak memory.

Shapes: B batch, S tokens in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D

from crosslayer.cache.kv_cache import Bytes, held_bytes
from crosslayer.cache.running import NewCache, prefill
from crosslayer.core.transformers_versions import CACHE, EMPTY_LAYER
from crosslayer.machine import Peak, free_memory, peak_memory, seconds
from crosslayer.stats.times import TimeComparison, compare_times
from crosslayer.wiring.read import model_plan
from crosslayer.wiring.result import ModelPlan

TIMES = {  # measures, and what tables call them
    "ttft": "time to first token",
    "tpot_dynamic": "time per token, dynamic cache",
    "tpot_static": "time per token, static cache",
}
# Steps that are not counted. On an H100, steps in the first seconds of a process took 58 ms instead of 21, for any
# model: only many more steps make up for that.
WARM_UP = 2


@dataclass(frozen=True)
class Load:
    """A configuration: B sequences of `context` tokens, then `new_tokens` decoded step by step, and the attention."""

    context: int
    batch: int = 1
    new_tokens: int = 16
    attention: str = "sdpa"

    @property
    def total(self) -> int:
        """Tokens in the cache at the end."""
        return self.context + self.new_tokens


def read_plans(models: Sequence[PreTrainedModel], load: Load, dtype: str | None = None) -> list[ModelPlan]:
    """Return the plans of models at the end of a configuration; empty if one of them has none."""
    try:
        return [model_plan(model, load.total, dtype or model.dtype, batch=load.batch) for model in models]
    except ValueError:
        return []


def too_large(models: Sequence[PreTrainedModel], load: Load, evicts: bool = False) -> str | None:
    """Return why a configuration is skipped: caches, activations and logits would not fit in free memory.

    If a candidate `evicts`, its prompt also needs a mask for each head. Its cache is counted in full, evicted or
    quantized: it is at most that.
    """
    caches = [plan.stored_bytes for plan in read_plans(models, load)]
    if not caches:
        return None
    free = free_memory(models[0].device)
    # Both models keep a cache where they take turns, and a static one is filled while the dynamic one is still there.
    need = sum(caches) + max(caches)

    # An MLP's activations and the residual streams around it, roughly, by the largest matrix that is not the head.
    activations = 0
    for model in models:
        head, linear = model.get_output_embeddings(), (nn.Linear, Conv1D)
        weights = [module.weight for module in model.modules() if isinstance(module, linear) and module is not head]
        # A model may store all of its matrices in a form of its own (quantized weights), and then has none here.
        if weights:
            outputs, inputs = max(weights, key=lambda weight: weight.numel()).shape
            size = load.batch * load.context * (3 * outputs + 4 * inputs) * weights[0].element_size()
            activations = max(activations, size)
    # Logits of the last tokens alone, in float32, and a copy of them.
    need += activations + max(load.batch * model.config.get_text_config().vocab_size * 8 for model in models)

    heads = max(model.config.get_text_config().per_layer_config[0].num_attention_heads for model in models)
    pairs = load.batch * heads * load.context**2
    # The boolean mask that eviction makes, and the additive one that sdpa makes of it.
    if evicts:
        need += pairs * (2 + models[0].dtype.itemsize)
    # Two copies of a layer's maps: softmax is taken in float32.
    if load.attention == "eager":
        need += 2 * pairs * 4
    if need <= free:
        return None
    return (
        f"context {load.context}, batch {load.batch} needs about {need / 1e9:.1f} GB of memory with {load.attention} "
        f"attention, and {free / 1e9:.1f} GB are free"
    )


@dataclass(frozen=True)
class Run:
    """What one run took: seconds by measure, bytes of its caches, and its peak memory."""

    seconds: dict[str, float]
    dynamic: Bytes
    static: Bytes | None
    peak: Peak


def random_ids(models: Sequence[PreTrainedModel], load: Load, seed: int = 0) -> Tensor:
    """Return random token ids (B, S) that all models know."""
    vocabulary = min(model.config.get_text_config().vocab_size for model in models)
    return torch.randint(0, vocabulary, (load.batch, load.total), generator=torch.Generator().manual_seed(seed))


def run(model: PreTrainedModel, load: Load, ids: Tensor, new_cache: NewCache | None = None, static: bool = True) -> Run:
    """Read a prompt and decode the tokens after it, with a dynamic cache and, if `static`, with a static one.

    The model is in evaluation mode, without gradients; `ids` (B, S) are prompt and new tokens. A model with a smaller
    cache, which `new_cache` makes, has only one kind of it, which the prompt fills again.
    """
    ids = ids.to(model.device)
    prompt = ids[:, : load.context]
    times: dict[str, float] = {}
    filled: list[Any] = []
    with peak_memory(model.device) as peak:
        times["ttft"] = seconds(lambda: filled.append(prefill(model, prompt, new_cache)), model.device)
        # Taken out of the list, which would keep it alive beside the static cache.
        dynamic = filled.pop()
        decoding = seconds(partial(_decode, model, load, ids, dynamic), model.device)
        times["tpot_dynamic"] = decoding / load.new_tokens
    dynamic_bytes, static_bytes = held_bytes(dynamic), None
    if static:
        cache = prefill(model, prompt, new_cache) if new_cache else static_cache(model, load, ids, dynamic)
        # Frees its memory before the steps with the other cache.
        del dynamic
        times["tpot_static"] = seconds(partial(_decode, model, load, ids, cache), model.device) / load.new_tokens
        static_bytes = held_bytes(cache)
    return Run(times, dynamic_bytes, static_bytes, peak)


def _decode(model: PreTrainedModel, load: Load, ids: Tensor, cache: Cache) -> None:
    """Read the new tokens one by one behind a prompt that is in the cache."""
    for position in range(load.context, load.total):
        model(ids[:, position : position + 1], **{CACHE: cache}, use_cache=True)


def static_cache(model: PreTrainedModel, load: Load, ids: Tensor, cache: Cache) -> StaticCache:
    """Return a static cache of the full length with the prompt: copied, or run again if a window has cut it."""
    static = StaticCache(config=model.config, max_cache_len=load.total)
    # Another layer (one with a window) does not hold all states of all tokens, so there is nothing to copy.
    if any(type(layer) not in (DynamicLayer, EMPTY_LAYER) for layer in cache.layers):
        model(ids[:, : load.context], **{CACHE: static}, use_cache=True)
        return static
    # Copying saves a second run of the prompt. The dynamic cache already holds the decoded tokens, which are left out.
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            static.update(layer.keys[:, :, : load.context], layer.values[:, :, : load.context], index)
    return static


def softmax_share(model: PreTrainedModel, load: Load, ids: Tensor) -> float:
    """Return which share of the time of a prompt softmax takes, with eager attention."""
    softmax = functional.softmax
    spent: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Tensor:
        results: list[Tensor] = []
        spent.append(seconds(lambda: results.append(softmax(*args, **kwargs)), model.device))
        return results[0]

    # Eager attention calls softmax by this name; fused kernels have none that could be timed.
    with mock.patch.object(functional, "softmax", timed):
        total = seconds(partial(prefill, model, ids[:, : load.context].to(model.device)), model.device)
    return sum(spent) / total


def steps_in_turns(models: Sequence[PreTrainedModel], load: Load, ids: Tensor) -> TimeComparison:
    """Return the time of a decoding step of a candidate and a baseline: each prompt runs once, then both take turns."""
    caches = [prefill(model, ids[:, : load.context].to(model.device)) for model in models]
    times: list[list[float]] = [[] for _ in models]
    for step, position in enumerate(range(load.context, load.total)):
        # Who begins alternates, so that both sides see the same load of the machine, and neither always follows.
        for side in (0, 1) if step % 2 else (1, 0):
            model = models[side]
            token = ids[:, position : position + 1].to(model.device)
            call = partial(model, token, **{CACHE: caches[side]}, use_cache=True)
            times[side].append(seconds(call, model.device))
    candidate, baseline = (of_side[WARM_UP:] for of_side in times)
    return compare_times(candidate, baseline)

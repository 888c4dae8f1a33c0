"""Run a model with a smaller KV cache: for which models it is defined, in `generate`, in batches, and to score a text.

A `Cache` by itself can quantize only between forward calls. With this module, each query attends to exactly what it
would attend to if the text were fed in token by token. A handler of the attention calls adds the quantized states of
tokens that are exact for only some queries of a call, and masks what was evicted. The model's own attention function
does the computation, so any implementation that takes a mask works.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from crosslayer.cache.attention import in_rotated_channels, mask_for, queries_by_block, rounded
from crosslayer.cache.eviction import Eviction, parse_eviction
from crosslayer.cache.kv_cache import SmallerKVCache
from crosslayer.cache.offsets import KeyOffset, key_offsets
from crosslayer.cache.quantized import first_exact
from crosslayer.cache.quantizers import rotates
from crosslayer.cache.state import Step, padding
from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.core.transformers_versions import CACHE, given_cache
from crosslayer.probe.intercept import AttentionCall, intercepted
from crosslayer.probe.model import evaluating, layer_stack, unwrapped
from crosslayer.wiring.kv_bits import KvBits, keeps_recent, parse_kv_bits
from crosslayer.wiring.read import model_plan
from crosslayer.wiring.result import ModelPlan
from crosslayer.wiring.states import field

LARGE_EXCESS = 100.0  # of the mean key's energy over the deviations': codes below 8 bits are then too coarse
NewCache = Callable[[], Cache]  # makes an empty cache for the model that runs


def checked_plan(model: PreTrainedModel, eviction: Eviction | None, bits: KvBits | None) -> ModelPlan:
    """Return the plan of a model that caches keys and values of its own tokens, each layer those of one layer.

    Raises:
        ValueError: it does not, or not as the eviction or the bits need it.
    """
    what = "a quantized KV cache" if eviction is None else "eviction"
    wiring = model_plan(model)
    plan, name = wiring.plan, f"{type(model).__name__} ({wiring.type})"
    if not wiring.caches or not model.can_generate():
        raise ValueError(f"{name} has no KV cache, so {what} is not supported")
    if field(model.config.get_text_config(), "kv_lora_rank"):
        raise ValueError(f"{name} caches latents; {what} needs the keys and values of each head")
    if plan.beyond_sharing:
        raise ValueError(f"{name}: {plan.beyond_sharing}; {what} does not support that")
    for layer, states in enumerate(wiring.layers):
        more = states.every or states.index or states.passes > 1 or states.fixed or states.fixed_float32
        if plan.attends(layer) and more:
            raise ValueError(f"{name}: layer {layer} has {states.mask}; {what} needs keys and values of each token")
        several = [state for state in CACHED if plan.read_count(state, layer) > 1]
        if several:
            raise ValueError(f"{name}: layer {layer} reads states of several layers; {what} does not support that")
        if eviction is not None and states.mask != "no attention" and states.keys == 0:
            raise ValueError(f"{name}: layer {layer} has {states.mask}; eviction needs softmax attention")
    if eviction is not None:
        eviction.check_layers(plan.layers, evicting_groups(wiring))
    if bits is not None:
        unlimited = [layer for layer, states in enumerate(wiring.layers) if states.window is None]
        bits.check_layers([layer for layer in unlimited if plan.stored(layer)], plan.layers)
        if eviction is not None and any(keeps_recent(bits.at(layer)) for layer in range(plan.layers)):
            _check_means(model, bits)
    return wiring


def _check_means(model: PreTrainedModel, bits: KvBits) -> None:
    """Refuse keys with a large mean: the positions of kept tokens are not known, so it cannot be subtracted."""
    excess = max((offset.excess for offset in key_offsets(model).values()), default=0.0)
    if excess > LARGE_EXCESS:
        raise ValueError(
            f"KV bits {bits.text!r}: eviction needs 8 bits or fp8 if the mean of keys exceeds their spread "
            f"tenfold, got {excess**0.5:.0f} times; try 8"
        )


def stored_kinds(wiring: ModelPlan, bits: KvBits | None) -> list[str | None]:
    """Return the types of stored keys and values by layer; None for a layer with a window, or one that stores none."""
    return [
        bits.at(layer) if bits is not None and wiring.plan.stored(layer) and states.window is None else None
        for layer, states in enumerate(wiring.layers)
    ]


def read_kinds(plan: DepthPlan, stored: list[str | None]) -> list[tuple[str | None, str | None]]:
    """Return the types of the keys and of the values that each layer reads, which are those of their sources."""
    kinds = []
    for layer in range(plan.layers):
        keys, values = ([stored[source] for source in plan.reads(state, layer)] for state in CACHED)
        kinds.append((keys[0] if keys else None, values[0] if values else None))
    return kinds


def evicting_groups(wiring: ModelPlan) -> list[list[int]]:
    """Return the groups of layers from which tokens are evicted: those without a window."""
    return [group for group in sharing_groups(wiring.plan) if wiring.layers[group[0]].window is None]


def sharing_groups(plan: DepthPlan) -> list[list[int]]:
    """Return the layers with attention, in groups that share keys or values, directly or through other layers."""
    groups: list[set[int]] = []
    for layer in filter(plan.attends, range(plan.layers)):
        joined = {layer, *(source for state in CACHED for source in plan.reads(state, layer))}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    return sorted(sorted(group) for group in groups)


def quantized_cache(model: PreTrainedModel, bits: KvBits | str | int = 4) -> SmallerKVCache:
    """Return an empty quantized cache for a model; pass it to `generate` as `cache` (before 5.24 `past_key_values`).

    Layers that share keys or values read their source's states, which are decoded once.

    Args:
        model: a causal language model, stock or of this package.
        bits: 8, 4, 3, 2, fp8, or by layer, such as "8@0-11,4@12-29".

    Raises:
        ValueError: the bits cannot be read, or a quantized cache is not defined for the model.
    """
    bits = bits if isinstance(bits, KvBits) else parse_kv_bits(bits)
    model = unwrapped(model)
    wiring = checked_plan(model, None, bits)
    offsets = _stored(key_offsets(model), wiring.plan)
    return SmallerKVCache(model.config, stored_kinds(wiring, bits), bits.recent, offsets)


@contextmanager
def smaller_cache(
    model: PreTrainedModel, evict: Eviction | str | None = None, bits: KvBits | str | int | None = None
) -> Iterator[NewCache]:
    """Run a model with a smaller KV cache while the block runs; gives a function that makes an empty one.

    Pass such a cache as `cache` (`past_key_values` before transformers 5.24) to the model or its `generate`. A call
    without a cache, which scores a text, gives the result of reading it token by token. Gradients are not supported.
    Everything is restored on exit.

    Args:
        model: a causal language model, stock or of this package, with sdpa or eager attention.
        evict: an `Eviction`, or a text that `parse_eviction` reads, such as "h2o:0.4". Layers with a window keep it.
        bits: 8, 4, 3, 2, fp8, or by layer, such as "8@0-11,4@12-29". With an eviction, the latest tokens are
            quantized, too.

    Raises:
        ValueError: neither is given, one cannot be read, or the model is not supported: encoders, linear attention,
            caches of compressed states, flash attention, and, for an eviction, windows in all layers.
    """
    if evict is None and bits is None:
        raise ValueError("`evict` or `bits` must be given, such as evict='h2o:0.4' or bits=4")
    eviction = parse_eviction(evict) if isinstance(evict, str) else evict
    model = unwrapped(model)
    run = _Run(model, eviction, bits if bits is None or isinstance(bits, KvBits) else parse_kv_bits(bits))
    layers = layer_stack(model)
    body = next(module for module in model.modules() if any(child is layers for child in module.children()))
    hook = body.register_forward_pre_hook(run.begin, with_kwargs=True)
    try:
        with torch.no_grad(), evaluating(model), intercepted(model, run.handle):
            yield run.new_cache
    finally:
        hook.remove()


class CacheOptions(NamedTuple):
    """How a model's KV cache is made smaller, as text: by an eviction, by fewer bits, by both, or not at all."""

    evict: str | None = None
    kv_bits: str | None = None

    def running(self, model: PreTrainedModel) -> AbstractContextManager[NewCache | None]:
        """Run a model as `smaller_cache` does; the context gives None if the model keeps its own cache."""
        return nullcontext() if self == CacheOptions() else smaller_cache(model, self.evict, self.kv_bits)

    def named(self, model: str) -> str:
        """Return how results call a model that runs with such a cache, as against the model itself: smollm2, 4 bits."""
        bits = None if self.kv_bits is None else parse_kv_bits(self.kv_bits).name
        return ", ".join(filter(None, (model, self.evict, bits)))

    def sentences(self) -> list[str]:
        """Return what is done with the cache of the candidate."""
        lines = []
        if self.evict is not None:
            about = parse_eviction(self.evict).rule.about
            lines.append(f"The candidate's KV cache evicts tokens ({self.evict}); it keeps {about}.")
        if self.kv_bits is not None:
            lines.append(f"The candidate's KV cache is quantized ({parse_kv_bits(self.kv_bits).about}).")
        return lines


class _Run:
    """The state of one use of `smaller_cache`, over all forward passes."""

    def __init__(self, model: PreTrainedModel, eviction: Eviction | None, bits: KvBits | None):
        wiring = checked_plan(model, eviction, bits)
        kind = model.config.get_text_config()._attn_implementation or "eager"
        if kind not in ("sdpa", "eager"):
            what = "a quantized KV cache" if eviction is None else "eviction"
            raise ValueError(f"{what} needs sdpa or eager attention, which take a mask, got {kind!r}")
        self.plan, self.eviction, self.bits = wiring.plan, eviction, bits
        self.config, self.way = model.config, (model.config, eviction, bits)
        self.stored_kinds = stored_kinds(wiring, bits)
        self.read_kinds = read_kinds(self.plan, self.stored_kinds)
        # under an eviction all tokens are rounded, and nothing is subtracted, since positions are not known
        self.recent = bits.recent if bits is not None and eviction is None else 0
        self.offsets = key_offsets(model) if bits is not None and eviction is None else {}
        self.groups = evicting_groups(wiring)
        self.group_of = {layer: number for number, group in enumerate(self.groups) for layer in group}
        self.cache = self.new_cache()  # raises for layers that cannot be quantized, even if no cache is used later
        self.is_cached = self.is_divided = False
        self.exact = 0  # the first column that comes exact, out of a cache or without one
        self.steps: dict[int, Step] = {}  # of the forward pass that is running, by group
        self.handled: set[int] = set()  # layers that have attended in this pass
        self.pads: list[int] | None = None  # in this pass, how many of each text's new columns are padding

    def new_cache(self) -> SmallerKVCache:
        """Return an empty cache."""
        offsets, groups = _stored(self.offsets, self.plan), self.groups
        return SmallerKVCache(self.config, self.stored_kinds, self.recent, offsets, self.eviction, groups, self.way)

    def begin(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check the cache that a forward pass receives, and note which columns are tokens."""
        arguments = inspect.signature(body.forward).bind_partial(*args, **kwargs).arguments
        arguments |= arguments.get("kwargs", {})
        cache = given_cache(arguments)
        if cache is not None and arguments.get("use_cache") is False:
            raise ValueError(
                f"{CACHE} came with use_cache=False, which makes `generate` read the whole text at every step; "
                "pass use_cache=True, or set it in the model's generation_config"
            )
        if cache is not None and (not isinstance(cache, SmallerKVCache) or cache.way != self.way):
            raise ValueError(
                f"the model runs under `smaller_cache` but got a different cache ({type(cache).__name__}); pass "
                f"{CACHE}=new_cache(), with the function that `smaller_cache` yields"
            )
        self.is_cached = cache is not None
        self.cache = self.new_cache() if cache is None else cache
        self.steps, self.handled, self.pads = {}, set(), None
        if self.bits is not None and self.eviction is None:
            before = self.cache.get_seq_length()
            self.exact = max(0, before - self.cache.reading.kept) if self.is_cached else 0
            ranks = token_ranks(arguments, before)
            self.cache.reading.see(ranks)
            self.is_divided = int(first_exact(ranks, ranks[:, -1], self.recent).max()) > self.exact

    def handle(self, call: AttentionCall) -> AttentionCall:
        """Make each query of a call read the states that it would read in token-by-token decoding."""
        call = call if self.bits is None else self._quantized(call)
        return call if self.eviction is None else self._evicted(call)

    def _quantized(self, call: AttentionCall) -> AttentionCall:
        """Return a call of rotated and rounded states; with queries in several parts, if they read different states."""
        kinds, exact, reading = self.read_kinds[call.layer], self.exact, self.cache.reading
        recent = [kind if self.recent and keeps_recent(kind) else None for kind in kinds]
        is_divided = self.is_divided and any(recent)
        call = in_rotated_channels(call, kinds, self.is_cached)
        if self.is_cached and not is_divided:
            return call
        shift: Tensor | float = 0.0
        if rotates(kinds[0]) and call.layer in self.offsets:
            positions = reading.positions(exact, call.key.shape[2], call.key.device)
            shift = self.offsets[call.layer].at(positions).to(call.key.dtype)
        if not self.is_cached:  # the others are read as they are stored, whatever the query
            others = [None if late else kind for kind, late in zip(kinds, recent, strict=True)]
            call = rounded(call, others, shift)
        if not is_divided:
            return call
        if call.position_bias is not None:
            raise ValueError("a quantized KV cache does not support attention with a position bias")
        assert reading.ranks is not None
        ranks = reading.ranks.to(call.key.device)
        later = replace(call, key=call.key[:, :, exact:], value=call.value[:, :, exact:])
        later = rounded(later, recent, shift, first=(ranks[:, exact:] == 1)[:, None, :, None])
        return replace(call, parts=tuple(queries_by_block(call, later, ranks, self.recent)))

    def _evicted(self, call: AttentionCall) -> AttentionCall:
        """Mask the tokens that a call must not attend to, and evict from its layer's cache."""
        if call.layer not in self.group_of:
            return call  # with a window
        if call.layer in self.handled:
            raise ValueError(f"layer {call.layer} attends twice in a forward pass; eviction does not support that")
        self.handled.add(call.layer)
        number = self.group_of[call.layer]
        if number not in self.steps:
            group, new = self.cache.groups[number], call.query.shape[2]
            if self.pads is None:
                self.pads = padding(call.mask, group.seen or [0] * len(call.query), new)
            self.steps[number] = group.step(call, self.pads)
        step = self.steps[number]
        if self.is_cached and step.kept is not None and self.plan.stored(call.layer):
            layer: Any = self.cache.layers[call.layer]
            layer.keep(step.kept, step.capacity)
        if not step.replaces:
            return call
        if step.mask is None:
            return replace(call, mask=None)
        # one of each key-value head (B, H_kv, T, S) for its query heads; layers of a group may lie on several devices
        mask = step.mask.to(call.query.device).repeat_interleave(call.query.shape[1] // step.mask.shape[1], dim=1)
        return replace(call, mask=mask_for(call, mask))


def token_ranks(arguments: Mapping[str, Any], before: int) -> Tensor:
    """Return how many tokens of a text lie up to each column, (B or 1, S), from a call's mask (B, S) if it has one."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.long().cumsum(-1)
    new = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
    return torch.arange(1, before + new.shape[1] + 1, device=new.device)[None]


def _stored(offsets: Mapping[int, KeyOffset], plan: DepthPlan) -> dict[int, KeyOffset]:
    """Return the offsets of the keys that layers store; others read those of another layer."""
    return {layer: offset for layer, offset in offsets.items() if "keys" in plan.stored(layer)}


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, new_cache: NewCache | None = None) -> Cache:
    """Return a fresh cache, dynamic or smaller, after a prompt (B, T); only the last logits are computed."""
    cache = DynamicCache(config=model.config) if new_cache is None else new_cache()
    options: dict[str, Any] = {CACHE: cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    model(ids, **options)
    return cache

"""Run a model with a smaller KV cache: for which models it is defined, in `generate`, in batches, and to score a text.

A `Cache` by itself can quantize only between forward calls. With this module, each query attends to exactly what it
would attend to if the text were fed in token by token. A handler of the attention calls adds the quantized states of
tokens that are exact for only some queries of a call, and masks what was evicted. The model's own attention function
does the computation, so any implementation that takes a mask works.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from crosslayer.cache.attention import mask_for, queries_by_block, rounded
from crosslayer.cache.eviction import Eviction, parse_eviction
from crosslayer.cache.kv_cache import SmallerKVCache
from crosslayer.cache.offsets import key_offsets
from crosslayer.cache.policies import policy
from crosslayer.cache.quantized import first_exact
from crosslayer.cache.quantizers import rotated, rotates
from crosslayer.cache.state import Step, padding
from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.core.transformers_versions import CACHE, given_cache
from crosslayer.probe.intercept import AttentionCall, intercepted
from crosslayer.probe.model import evaluating, layer_stack, unwrapped
from crosslayer.wiring.kv_bits import KvBits, keeps_recent, parse_kv_bits
from crosslayer.wiring.read import model_plan
from crosslayer.wiring.result import ModelPlan
from crosslayer.wiring.states import field as config_field

# Of the mean key's energy over the deviations': keys of 4 bits are then too coarse, unless the mean is subtracted. With
# a mean up to 180 times the spread, Qwen2.5-Coder-0.5B has 0.7 nats so, and 0.004 without its mean.
LARGE_EXCESS = 100.0
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
    if config_field(model.config.get_text_config(), "kv_lora_rank"):
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
        bits.check_count(plan.layers, f"KV bits {bits.text!r}")
        unlimited = [layer for layer, states in enumerate(wiring.layers) if states.window is None]
        if all(bits.at(layer) is None for layer in unlimited if plan.stored(layer)):
            named = "no layer of the model stores" if bits.everywhere else "none of these layers stores"
            raise ValueError(f"KV bits {bits.text!r}: {named} quantizable keys or values (of all tokens)")
        # the positions of kept tokens are not known, so a large mean of keys cannot be subtracted
        if eviction is not None and any(keeps_recent(bits.at(layer)) for layer in range(plan.layers)):
            excess = max((offset.excess for offset in key_offsets(model).values()), default=0.0)
            if excess > LARGE_EXCESS:
                raise ValueError(
                    f"KV bits {bits.text!r}: eviction needs 8 bits or fp8 if the mean of keys exceeds their spread "
                    f"tenfold, got {excess**0.5:.0f} times; try 8"
                )
    return wiring


def stored_kinds(wiring: ModelPlan, bits: KvBits | None) -> list[str | None]:
    """Return the types of stored keys and values by layer; None for a layer with a window, or one that stores none."""
    return [
        bits.at(layer) if bits is not None and wiring.plan.stored(layer) and states.window is None else None
        for layer, states in enumerate(wiring.layers)
    ]


def evicting_groups(wiring: ModelPlan) -> list[list[int]]:
    """Return the groups of layers from which tokens are evicted: those without a window, which is kept as it is."""
    return [group for group in sharing_groups(wiring.plan) if wiring.layers[group[0]].window is None]


def sharing_groups(plan: DepthPlan) -> list[list[int]]:
    """Return the layers with attention, in groups that share keys or values, directly or through other layers."""
    groups: list[set[int]] = []
    for layer in filter(plan.attends, range(plan.layers)):
        joined = {layer, *(source for state in CACHED for source in plan.reads(state, layer))}
        # a layer may join groups that were apart
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
    stored = wiring.plan.stored  # a layer that stores no keys reads those of another, with its offset
    offsets = {layer: offset for layer, offset in key_offsets(model).items() if "keys" in stored(layer)}
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
    # the module that holds the layers gets the cache and the mask, whatever wraps it
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
            about = policy(parse_eviction(self.evict).policy).about
            lines.append(f"The candidate's KV cache evicts tokens ({self.evict}); it keeps {about}.")
        if self.kv_bits is not None:
            lines.append(f"The candidate's KV cache is quantized ({parse_kv_bits(self.kv_bits).about}).")
        return lines


@dataclass
class _Pass:
    """The state of one forward pass.

    Attributes:
        cache: that it reads and writes; without a cache of the caller, one that nobody reads afterwards.
        is_cached: whether the caller gave it.
        exact: the first column that comes exact, out of a cache or without one.
        is_divided: whether some queries read quantized what others read exactly.
        pads: of each text, how many of its new columns are padding; None: not known yet.
        steps: of the groups that have attended, by number.
        handled: layers that have attended.
    """

    cache: SmallerKVCache
    is_cached: bool = False
    exact: int = 0
    is_divided: bool = False
    pads: list[int] | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    handled: set[int] = field(default_factory=set)


class _Run:
    """One use of `smaller_cache`: what all its forward passes have in common, and the one that is running."""

    def __init__(self, model: PreTrainedModel, eviction: Eviction | None, bits: KvBits | None):
        wiring = checked_plan(model, eviction, bits)
        kind = model.config.get_text_config()._attn_implementation or "eager"
        if kind not in ("sdpa", "eager"):
            what = "a quantized KV cache" if eviction is None else "eviction"
            raise ValueError(f"{what} needs sdpa or eager attention, which take a mask, got {kind!r}")
        self.plan, self.eviction, self.bits = wiring.plan, eviction, bits
        self.way = (model.config, eviction, bits)
        # under an eviction all tokens are rounded, and nothing is subtracted, since positions are not known
        self.recent = bits.recent if bits is not None and eviction is None else 0
        self.offsets = key_offsets(model) if bits is not None and eviction is None else {}
        groups = evicting_groups(wiring)
        self.group_of = {layer: number for number, group in enumerate(groups) for layer in group}
        kinds = stored_kinds(wiring, bits)
        # of each layer the types of the keys and of the values that it reads: those of their sources
        self.read_kinds: list[list[str | None]] = []
        for layer in range(self.plan.layers):
            sources = (self.plan.reads(state, layer) for state in CACHED)
            self.read_kinds.append([kinds[layers[0]] if layers else None for layers in sources])
        # a layer that stores no keys reads those of another, with its offset
        offsets = {layer: offset for layer, offset in self.offsets.items() if "keys" in self.plan.stored(layer)}
        self.new_cache = partial(SmallerKVCache, model.config, kinds, self.recent, offsets, eviction, groups, self.way)
        # raises for layers that cannot be quantized, even if no cache is used later
        self.current = _Pass(self.new_cache())

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
        current = _Pass(self.new_cache() if cache is None else cache, is_cached=cache is not None)
        self.current = current
        if self.bits is None or self.eviction is not None:
            return

        # how many tokens of a text lie up to each column, (B or 1, S): a mask (B, S) says which columns are padding
        reading, before = current.cache.reading, current.cache.get_seq_length()
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            ranks = mask.long().cumsum(-1)
        else:
            new = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
            ranks = torch.arange(1, before + new.shape[1] + 1, device=new.device)[None]
        # columns are exact from where they were for this call; then as the query behind the call will need them
        current.exact = max(0, before - reading.kept) if current.is_cached else 0
        reading.ranks = ranks
        reading.kept = ranks.shape[1] - int(first_exact(ranks, ranks[:, -1] + 1, reading.recent).min())
        current.is_divided = int(first_exact(ranks, ranks[:, -1], self.recent).max()) > current.exact

    def handle(self, call: AttentionCall) -> AttentionCall:
        """Make each query of a call read the states that it would read in token-by-token decoding."""
        call = call if self.bits is None else self._quantized(call)
        if self.eviction is None or call.layer not in self.group_of:
            return call  # without an eviction, or with a window

        # evict from the layer's cache, and mask the tokens that the call must not attend to
        current = self.current
        if call.layer in current.handled:
            raise ValueError(f"layer {call.layer} attends twice in a forward pass; eviction does not support that")
        current.handled.add(call.layer)
        number = self.group_of[call.layer]
        if number not in current.steps:  # the group's first layer decides for all of them
            group, new = current.cache.groups[number], call.query.shape[2]
            if current.pads is None:
                current.pads = padding(call.mask, group.seen or [0] * len(call.query), new)
            current.steps[number] = group.step(call, current.pads)
        step = current.steps[number]
        if current.is_cached and step.kept is not None and self.plan.stored(call.layer):
            layer: Any = current.cache.layers[call.layer]
            for columns in layer.columns:
                columns.keep(step.kept, step.capacity)
        if not step.replaces:
            return call
        if step.mask is None:
            return replace(call, mask=None)
        # one of each key-value head (B, H_kv, T, S) for its query heads; layers of a group may lie on several devices
        mask = step.mask.to(call.query.device).repeat_interleave(call.query.shape[1] // step.mask.shape[1], dim=1)
        return replace(call, mask=mask_for(call, mask))

    def _quantized(self, call: AttentionCall) -> AttentionCall:
        """Return a call of rotated and rounded states; with queries in several parts, if they read different states."""
        current = self.current
        kinds, exact, reading = self.read_kinds[call.layer], current.exact, current.cache.reading
        recent = [kind if self.recent and keeps_recent(kind) else None for kind in kinds]
        is_divided = current.is_divided and any(recent)

        # over rotated keys and values, which come rotated out of a cache; the output is the same
        by_keys, by_values = rotates(kinds[0]), rotates(kinds[1])
        call = replace(
            call,
            query=rotated(call.query) if by_keys else call.query,
            key=call.key if current.is_cached or not by_keys else rotated(call.key),
            value=call.value if current.is_cached or not by_values else rotated(call.value),
            after=partial(rotated, back=True) if by_values else None,
        )
        if current.is_cached and not is_divided:
            return call

        # types without exact tokens are read as they are stored, whatever the query; keys are rounded less their mean
        shift: Tensor | float = 0.0
        if by_keys and call.layer in self.offsets:
            positions = reading.positions(exact, call.key.shape[2], call.key.device)
            shift = self.offsets[call.layer].at(positions).to(call.key.dtype)
        if not current.is_cached:
            whole = [None if late else kind for kind, late in zip(kinds, recent, strict=True)]
            call = rounded(call, whole, shift)
        if not is_divided:
            return call

        # the others are exact for only some queries
        if call.position_bias is not None:
            raise ValueError("a quantized KV cache does not support attention with a position bias")
        assert reading.ranks is not None
        ranks = reading.ranks.to(call.key.device)
        later = replace(call, key=call.key[:, :, exact:], value=call.value[:, :, exact:])
        later = rounded(later, recent, shift, first=(ranks[:, exact:] == 1)[:, None, :, None])
        return replace(call, parts=tuple(queries_by_block(call, later, ranks, self.recent)))


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, new_cache: NewCache | None = None) -> Cache:
    """Return a fresh cache, dynamic or smaller, after a prompt (B, T); only the last logits are computed."""
    cache = DynamicCache(config=model.config) if new_cache is None else new_cache()
    options: dict[str, Any] = {CACHE: cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    model(ids, **options)
    return cache

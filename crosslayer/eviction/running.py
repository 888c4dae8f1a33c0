"""Run a model with KV cache eviction: in `generate`, in batches, and when a text is only scored.

A handler of every attention call records the calls of each group's first layer, masks what was evicted, and shrinks
the layer's cache. The model's own attention function computes, so any implementation that takes a mask works.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.core.transformers_versions import CACHE, given_cache
from crosslayer.eviction.cache import EvictionCache
from crosslayer.eviction.eviction import Eviction, parse_eviction
from crosslayer.eviction.state import GroupState, Step, padding
from crosslayer.probe.intercept import AttentionCall, evaluating, intercepted, layer_stack
from crosslayer.wiring.read import read_plan
from crosslayer.wiring.values import field

NewCache = Callable[[], EvictionCache]


@contextmanager
def evicting(model: PreTrainedModel, eviction: Eviction | str) -> Iterator[NewCache]:
    """Evict cached tokens while the block runs; gives a function that makes an empty cache.

    Pass such a cache as `cache` (`past_key_values` before transformers 5.24) to the model or its `generate`. A call
    without a cache, which scores a text, reads it as it would be read token by token: each token attends to what was
    still cached at that point. Gradients are not supported. Everything is restored on exit.

    Args:
        model: a causal language model, stock or of this package, with sdpa or eager attention.
        eviction: an `Eviction`, or a text that `parse_eviction` reads, such as "h2o:0.4".

    Raises:
        ValueError: the eviction cannot be read, or it is not defined for the model: an encoder, sliding windows, linear
            attention, a cache of compressed states, or flash attention.

    """
    eviction = parse_eviction(eviction) if isinstance(eviction, str) else eviction
    plan = _checked_plan(model, eviction)
    run = _Run(plan, eviction)
    layers = layer_stack(model)
    body = next(module for module in model.modules() if any(child is layers for child in module.children()))
    hook = body.register_forward_pre_hook(
        run.begin, with_kwargs=True
    )  # the module that receives the cache and calls the layers
    try:
        with torch.no_grad(), evaluating(model), intercepted(model, run.handle):
            yield run.new_cache
    finally:
        hook.remove()


@contextmanager
def evicting_if(model: PreTrainedModel, eviction: str | None) -> Iterator[NewCache | None]:
    """Do what `evicting` does; with None do nothing, and give None instead of a function that makes a cache."""
    if eviction is None:
        yield None
        return
    with evicting(model, eviction) as new_cache:
        yield new_cache


def sharing_groups(plan: DepthPlan) -> list[list[int]]:
    """Return the layers with attention, in groups that share keys or values, directly or through other layers."""
    groups: list[set[int]] = []
    for layer in filter(plan.attends, range(plan.layers)):
        joined = {layer, *(source for state in CACHED for source in plan.reads(state, layer))}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    return sorted(sorted(group) for group in groups)


class _Run:
    """The state of one use of `evicting`, over all forward passes."""

    def __init__(self, plan: DepthPlan, eviction: Eviction):
        self.eviction, self.layers = eviction, plan.layers
        groups = sharing_groups(plan)
        self.first_layers = [group[0] for group in groups]
        self.group_of = {layer: number for number, group in enumerate(groups) for layer in group}
        self.stores = [bool(plan.stored(layer)) for layer in range(plan.layers)]
        self.cache = self.new_cache()
        self.is_stored = False
        self.steps: dict[int, Step] = {}  # of the forward pass that is running, by group
        self.handled: set[int] = set()  # layers that have attended in this pass
        self.pads: list[int] | None = None  # in this pass, how many of each text's new columns are padding

    def new_cache(self) -> EvictionCache:
        """Return an empty cache."""
        amounts = [self.eviction.amount(layer) for layer in self.first_layers]
        return EvictionCache(self.layers, [GroupState(self.eviction.rule, amount) for amount in amounts], self)

    def begin(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check the cache that a forward pass receives."""
        arguments = inspect.signature(body.forward).bind_partial(*args, **kwargs).arguments
        arguments = {**arguments, **arguments.get("kwargs", {})}
        cache = given_cache(arguments)
        if cache is not None and arguments.get("use_cache") is False:
            raise ValueError(
                f"{CACHE} came with use_cache=False, which makes `generate` read the whole text at every step; "
                "pass use_cache=True, or set it in the model's generation_config"
            )
        if cache is not None and (not isinstance(cache, EvictionCache) or cache.run is not self):
            raise ValueError(
                f"the model runs under `evicting` but got another cache ({type(cache).__name__}); pass "
                f"{CACHE}=new_cache(), with the function that `evicting` gives"
            )
        self.is_stored = cache is not None
        self.cache = self.new_cache() if cache is None else cache
        self.steps, self.handled, self.pads = {}, set(), None

    def handle(self, call: AttentionCall) -> AttentionCall:
        """Mask the tokens that a call must not attend to, and evict from its layer's cache."""
        if call.layer in self.handled:
            raise ValueError(f"layer {call.layer} attends twice in a forward pass; eviction is not defined for that")
        self.handled.add(call.layer)
        number = self.group_of[call.layer]
        if number not in self.steps:
            group, new = self.cache.groups[number], call.query.shape[2]
            if self.pads is None:
                self.pads = padding(call.mask, group.seen or [0] * len(call.query), new)
            self.steps[number] = group.step(call, self.pads)
        step = self.steps[number]
        if self.is_stored and step.kept is not None and self.stores[call.layer]:
            self.cache.states[call.layer].keep(step.kept, step.capacity)
        return replace(call, mask=_mask_for(call, step.mask)) if step.replaces else call


def _mask_for(call: AttentionCall, mask: Tensor | None) -> Tensor | None:
    """Return a mask (B, H_kv, T, S) as a call's attention function takes it, (B, H, T, S)."""
    if mask is None:
        return None
    groups = call.query.shape[1] // mask.shape[1]
    mask = mask.to(call.query.device)  # layers of a group may lie on several devices
    mask = mask.repeat_interleave(groups, dim=1) if groups > 1 else mask
    if call.implementation == "sdpa":
        return mask
    hidden = torch.finfo(call.query.dtype).min
    return torch.zeros(mask.shape, dtype=call.query.dtype, device=mask.device).masked_fill(~mask, hidden)


def _checked_plan(model: PreTrainedModel, eviction: Eviction) -> DepthPlan:
    """Return which layers store and which read, if eviction is defined for the model."""
    wiring = read_plan(model)
    name = f"{type(model).__name__} ({wiring.type})"
    if not wiring.caches or not model.can_generate():
        raise ValueError(f"{name} keeps no KV cache, so nothing can be evicted")
    if field(model.config.get_text_config(), "kv_lora_rank"):
        raise ValueError(f"{name} caches compressed keys and values; eviction needs those of each head")
    kind = model.config.get_text_config()._attn_implementation or "eager"
    if kind not in ("sdpa", "eager"):
        raise ValueError(f"eviction needs sdpa or eager attention, which take a mask, got {kind!r}")
    plan = wiring.plan
    for layer, states in enumerate(wiring.layers):
        if states.mask != "no attention" and (states.keys == 0 or states.window or states.every or states.index):
            raise ValueError(f"{name}: layer {layer} has {states.mask}; eviction needs full attention")
        several = [state for state in CACHED if plan.read_count(state, layer) > 1]
        if plan.value_shares[layer] < 1 or several:
            raise ValueError(f"{name}: layer {layer} reads states of several layers; eviction is not defined for that")
    eviction.check_layers(plan.layers, sharing_groups(plan))
    return plan

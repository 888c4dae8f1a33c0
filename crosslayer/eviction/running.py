"""Run a model with KV cache eviction: in `generate`, in batches, and when a text is only scored.

A handler of every attention call records the calls of each group's first layer, masks what was evicted, and shrinks
the layer's cache. The model's own attention function computes, so any implementation that takes a mask works.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from crosslayer.core.columns import ColumnLayer
from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.core.transformers_versions import CACHE, given_cache
from crosslayer.eviction.cache import EvictionCache
from crosslayer.eviction.eviction import Eviction, parse_eviction
from crosslayer.eviction.state import GroupState, Step, padding
from crosslayer.probe.intercept import AttentionCall, evaluating, intercepted
from crosslayer.quantization.cache import QuantisedLayer, Reading
from crosslayer.quantization.offsets import key_offsets
from crosslayer.quantization.running import (
    call_arguments,
    called_with_cache,
    check_masks,
    checked_plan,
    in_rotated_channels,
    mask_for,
    quantizing,
    rounded,
    state_kinds,
)
from crosslayer.wiring.kv_bits import KvBits, keeps_recent, parse_kv_bits
from crosslayer.wiring.result import ModelPlan

LARGE_EXCESS = 100.0  # of the mean key's energy over the deviations': codes below 8 bits are then too coarse
NewCache = Callable[[], Cache]  # makes an empty cache for the model that runs


@contextmanager
def evicting(
    model: PreTrainedModel, eviction: Eviction | str, kv_bits: KvBits | str | int | None = None
) -> Iterator[Callable[[], EvictionCache]]:
    """Evict cached tokens while the block runs; gives a function that makes an empty cache.

    Pass such a cache as `cache` (`past_key_values` before transformers 5.24) to the model or its `generate`. A call
    without a cache, which scores a text, reads it as it would be read token by token: each token attends to what was
    still cached at that point. Gradients are not supported. Everything is restored on exit.

    Args:
        model: a causal language model, stock or of this package, with sdpa or eager attention.
        eviction: an `Eviction`, or a text that `parse_eviction` reads, such as "h2o:0.4".
        kv_bits: quantises the tokens that are kept, the latest too; as `quantizing` takes it.

    Raises:
        ValueError: the eviction cannot be read, or it is not defined for the model: an encoder, sliding windows, linear
            attention, a cache of compressed states, or flash attention.

    """
    eviction = parse_eviction(eviction) if isinstance(eviction, str) else eviction
    bits = kv_bits if kv_bits is None or isinstance(kv_bits, KvBits) else parse_kv_bits(kv_bits)
    run = _Run(_checked_plan(model, eviction, bits), eviction, bits)
    with torch.no_grad(), evaluating(model), called_with_cache(model, run.begin), intercepted(model, run.handle):
        yield run.new_cache


class SmallerCache(NamedTuple):
    """How a model's KV cache is made smaller: by an eviction, by fewer bits, by both, or not at all."""

    evict: str | None = None
    kv_bits: str | None = None

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[NewCache | None]:
        """Run a model with such a cache; gives a function that makes an empty one, None for the model's own."""
        if self.evict is not None:
            with evicting(model, self.evict, self.kv_bits) as new_cache:
                yield new_cache
        elif self.kv_bits is not None:
            with quantizing(model, self.kv_bits) as new_cache:
                yield new_cache
        else:
            yield None

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
            lines.append(f"The candidate's KV cache is quantised ({parse_kv_bits(self.kv_bits).about}).")
        return lines


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

    def __init__(self, wiring: ModelPlan, eviction: Eviction, bits: KvBits | None):
        plan = wiring.plan
        self.eviction = eviction
        self.stored_kinds = [None if bits is None else bits.kind(layer) for layer in range(plan.layers)]
        self.read_kinds = None if bits is None else state_kinds(wiring, bits)
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
        layers = [ColumnLayer() if kind is None else QuantisedLayer(kind, Reading(0)) for kind in self.stored_kinds]
        return EvictionCache(layers, [GroupState(self.eviction.rule, amount) for amount in amounts], self)

    def begin(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check the cache that a forward pass receives."""
        arguments = call_arguments(body, args, kwargs)
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
        if self.read_kinds is not None:
            kinds = self.read_kinds[call.layer]
            call = in_rotated_channels(call, kinds, self.is_stored)
            call = call if self.is_stored else rounded(call, kinds)
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
    return mask_for(call, mask.repeat_interleave(groups, dim=1) if groups > 1 else mask)


def _checked_plan(model: PreTrainedModel, eviction: Eviction, bits: KvBits | None) -> ModelPlan:
    """Return which layers store and which read, if eviction is defined for the model."""
    wiring = checked_plan(model, "eviction")
    check_masks(model, "eviction")
    for layer, states in enumerate(wiring.layers):
        if states.mask != "no attention" and (states.keys == 0 or states.window):
            name = f"{type(model).__name__} ({wiring.type})"
            raise ValueError(f"{name}: layer {layer} has {states.mask}; eviction needs full attention")
    plan = wiring.plan
    eviction.check_layers(plan.layers, sharing_groups(plan))
    if bits is not None:
        bits.check_layers([layer for layer in range(plan.layers) if plan.stored(layer)], plan.layers)
        if any(map(keeps_recent, map(bits.kind, range(plan.layers)))):
            excess = max((offset.excess for offset in key_offsets(model).values()), default=0.0)
            if excess > LARGE_EXCESS:  # positions of kept tokens are not known, so the offset cannot be subtracted
                raise ValueError(
                    f"KV bits {bits.text!r}: eviction needs 8 bits or fp8 if the mean of keys exceeds their spread "
                    f"tenfold, got {excess**0.5:.0f} times; try 8"
                )
    return wiring

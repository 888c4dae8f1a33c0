"""Run a model with a quantised KV cache: in `generate`, in batches, and when a text is only scored.

A cache alone sees calls, and quantises between them. Here every query reads what it would read if its text were read
token by token: a handler of the attention calls adds the quantised states of the tokens that are exact for some queries
of the call and not for others.

Shapes: B batch, T new tokens, S cached + new tokens, H heads, H_kv key-value heads, D head size.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.plan import CACHED
from crosslayer.core.transformers_versions import CACHE, given_cache
from crosslayer.probe.intercept import AttentionCall, evaluating, intercepted, layer_stack
from crosslayer.quantization.cache import QuantizedKVCache, Reading, first_exact
from crosslayer.quantization.codec import codec_of, rotated, rotates
from crosslayer.quantization.offsets import KeyOffset, key_offsets
from crosslayer.wiring.kv_bits import KvBits, keeps_recent, parse_kv_bits
from crosslayer.wiring.read import model_plan
from crosslayer.wiring.result import ModelPlan
from crosslayer.wiring.values import field

QUERIES = 256  # that attend at a time, when some of them read quantised what others read exactly


def quantized_cache(model: PreTrainedModel, bits: KvBits | str | int = 4) -> QuantizedKVCache:
    """Return an empty quantised cache for a model; pass it to `generate` as `cache` (before 5.24 `past_key_values`).

    Layers that share keys or values read what their source stores, which is decoded once.

    Args:
        model: a causal language model, stock or of this package.
        bits: 8, 4, 3, 2, fp8, or by layer, such as "8@0-11,4@12-29".

    Raises:
        ValueError: the bits cannot be read, or a quantised cache is not defined for the model.

    """
    bits = bits if isinstance(bits, KvBits) else parse_kv_bits(bits)
    plan = _check(model, bits)
    return QuantizedKVCache(model.config, bits, stored_kinds(plan, bits), _stored(key_offsets(model), plan))


@contextmanager
def quantizing(model: PreTrainedModel, bits: KvBits | str | int) -> Iterator[Callable[[], QuantizedKVCache]]:
    """Run a model with a quantised KV cache while the block runs; gives a function that makes an empty cache.

    Pass such a cache to the model or its `generate`. A call without a cache, which scores a text, reads it as it would
    be read token by token. Gradients are not supported. Everything is restored on exit.

    Args:
        model: a causal language model, stock or of this package, with sdpa or eager attention.
        bits: 8, 4, 3, 2, fp8, or by layer, such as "8@0-11,4@12-29".

    Raises:
        ValueError: the bits cannot be read, or a quantised cache is not defined for the model.

    """
    bits = bits if isinstance(bits, KvBits) else parse_kv_bits(bits)
    plan = _check(model, bits)
    check_masks(model, "a quantised KV cache")
    kinds, offsets = stored_kinds(plan, bits), key_offsets(model)
    run = _Run(bits, plan, offsets)
    new_cache = partial(QuantizedKVCache, model.config, bits, kinds, _stored(offsets, plan), returns_rotated=True)
    new_cache()  # raises for layers that cannot be quantized, even if no cache is used later
    with torch.no_grad(), evaluating(model), called_with_cache(model, run.begin), intercepted(model, run.handle):
        yield new_cache


@contextmanager
def called_with_cache(model: PreTrainedModel, begin: Callable[..., None]) -> Iterator[None]:
    """Call `begin` with what the module that calls the layers receives, at each call."""
    layers = layer_stack(model)
    body = next(module for module in model.modules() if any(child is layers for child in module.children()))
    hook = body.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def call_arguments(body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    arguments = inspect.signature(body.forward).bind_partial(*args, **kwargs).arguments
    return {**arguments, **arguments.get("kwargs", {})}


class _Run:
    """The state of one use of `quantizing`, over all forward passes."""

    def __init__(self, bits: KvBits, plan: ModelPlan, offsets: Mapping[int, KeyOffset]):
        self.bits, self.kinds, self.offsets = bits, state_kinds(plan, bits), offsets
        self.is_cached = self.is_divided = False
        self.exact = 0  # the first column that comes exact, out of a cache or without one
        self.reading = Reading(bits.recent)

    def begin(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check the cache that a forward pass receives, and note which columns are tokens."""
        arguments = call_arguments(body, args, kwargs)
        cache = given_cache(arguments)
        ours = cache if isinstance(cache, QuantizedKVCache) else None
        if cache is not None and (ours is None or ours.bits != self.bits or not ours.returns_rotated):
            raise ValueError(
                f"the model runs under `quantizing` but got another cache ({type(cache).__name__}); pass "
                f"{CACHE}=new_cache(), with the function that `quantizing` gives"
            )
        before = 0 if ours is None else ours.get_seq_length()
        self.is_cached = ours is not None
        self.reading = Reading(self.bits.recent) if ours is None else ours.reading
        self.exact = 0 if ours is None else max(0, before - self.reading.kept)
        ranks = token_ranks(arguments, before)
        self.reading.see(ranks)
        self.is_divided = int(first_exact(ranks, ranks[:, -1], self.bits.recent).max()) > self.exact

    def handle(self, call: AttentionCall) -> AttentionCall:
        """Let each query of a call read what it would read if the text came token by token."""
        kinds, exact = self.kinds[call.layer], self.exact
        recent = [kind if keeps_recent(kind) else None for kind in kinds]
        is_divided = self.is_divided and any(recent)
        call = in_rotated_channels(call, kinds, self.is_cached)
        if self.is_cached and not is_divided:
            return call
        shift: Tensor | float = 0.0
        if rotates(kinds[0]) and call.layer in self.offsets:
            positions = self.reading.positions(exact, call.key.shape[2], call.key.device)
            shift = self.offsets[call.layer].at(positions).to(call.key.dtype)
        if not self.is_cached:  # the others are read as they are stored, whatever the query
            call = rounded(call, [None if keeps_recent(kind) else kind for kind in kinds], shift)
        if not is_divided:
            return call
        if call.position_bias is not None:
            raise ValueError("a quantised KV cache is not defined for attention with a position bias")
        assert self.reading.ranks is not None
        ranks = self.reading.ranks.to(call.key.device)
        later = replace(call, key=call.key[:, :, exact:], value=call.value[:, :, exact:])
        later = rounded(later, recent, shift, first=(ranks[:, exact:] == 1)[:, None, :, None])
        return replace(call, parts=tuple(queries_by_block(call, later, ranks, self.bits.recent)))


def token_ranks(arguments: Mapping[str, Any], before: int) -> Tensor:
    """Return how many tokens of a text lie up to each column, (B or 1, S), from a call's mask (B, S) if it has one."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.long().cumsum(-1)
    new = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
    return torch.arange(1, before + new.shape[1] + 1, device=new.device)[None]


def stored_kinds(plan: ModelPlan, bits: KvBits) -> list[str | None]:
    """Return the types in which layers store keys and values: not those with a window, nor those that store none."""
    layers = enumerate(plan.layers)
    return [bits.kind(layer) if plan.plan.stored(layer) and one.window is None else None for layer, one in layers]


def _stored(offsets: Mapping[int, KeyOffset], plan: ModelPlan) -> dict[int, KeyOffset]:
    """Return the offsets of the keys that layers store; others read those of another layer."""
    return {layer: offset for layer, offset in offsets.items() if "keys" in plan.plan.stored(layer)}


def state_kinds(plan: ModelPlan, bits: KvBits) -> list[tuple[str | None, str | None]]:
    """Return the types of the keys and of the values that each layer reads, which are those of their sources."""
    stored, kinds = stored_kinds(plan, bits), []
    for layer in range(len(stored)):
        keys, values = ([stored[source] for source in plan.plan.reads(state, layer)] for state in CACHED)
        kinds.append((keys[0] if keys else None, values[0] if values else None))
    return kinds


def in_rotated_channels(call: AttentionCall, kinds: tuple[str | None, str | None], is_cached: bool) -> AttentionCall:
    """Return a call with the same output over rotated keys and values; out of a cache they come rotated."""
    by_keys, by_values = map(rotates, kinds)
    return replace(
        call,
        query=rotated(call.query) if by_keys else call.query,
        key=call.key if is_cached or not by_keys else rotated(call.key),
        value=call.value if is_cached or not by_values else rotated(call.value),
        after=partial(rotated, back=True) if by_values else None,
    )


def rounded(
    call: AttentionCall,
    kinds: Sequence[str | None],
    shift: Tensor | float = 0.0,
    first: Tensor | None = None,
) -> AttentionCall:
    """Return a call whose keys and values are quantised and back, keys less a shift (B or 1, H_kv, T, D).

    Where `first` (B or 1, 1, T, 1) is true they stay as they are.
    """
    keys, values = call.key, call.value
    if kinds[0] is not None:
        keys = codec_of(kinds[0]).rounded(call.key - shift) + shift
    if kinds[1] is not None:
        values = codec_of(kinds[1]).rounded(call.value)
    if first is not None:
        keys, values = torch.where(first, call.key, keys), torch.where(first, call.value, values)
    return replace(call, key=keys, value=values)


def queries_by_block(
    call: AttentionCall, rounded_states: AttentionCall, ranks: Tensor, recent: int
) -> Iterator[AttentionCall]:
    """Return calls of `QUERIES` queries each, which read the `recent` latest tokens exactly, others as rounded.

    In `call` the first columns are quantised already; `rounded_states` are the others, quantised. `ranks` (B or 1, S)
    counts the tokens up to a column.
    """
    new, width = call.query.shape[2], call.key.shape[2]
    before, exact = width - new, width - rounded_states.key.shape[2]
    allowed = allowed_by(call)  # (B or 1, 1, T, S)
    ahead = bool(allowed.triu(before + 1).any())  # queries that attend to later tokens
    quantised = torch.arange(width, device=ranks.device) < exact
    for start in range(0, new, QUERIES):
        end = min(start + QUERIES, new)
        rank = ranks[:, before + start : before + end]  # (B or 1, Q)
        near, far = (first_exact(ranks, rank[:, at], recent) for at in (0, -1))  # (B or 1,)
        near, far = max(exact, int(near.min())), max(exact, int(far.max()))
        last = width if ahead else before + end
        old = (ranks[:, None] <= rank[..., None] - recent)[:, None]  # (B or 1, 1, Q, S)
        by_codes = (old | quantised)[..., :far] & allowed[:, :, start:end, :far]
        exactly = ~old[..., near:last] & allowed[:, :, start:end, near:last]
        keys, values = (
            torch.cat([own[:, :, :exact], other[:, :, : far - exact], own[:, :, near:last]], 2)
            for own, other in ((call.key, rounded_states.key), (call.value, rounded_states.value))
        )
        sinks = call.options.get("sinks")  # (B, H, T, 1)
        yield replace(
            call,
            query=call.query[:, :, start:end],
            key=keys,
            value=values,
            mask=mask_for(call, torch.cat([by_codes, exactly], -1)),
            options=call.options if sinks is None else {**call.options, "sinks": sinks[:, :, start:end]},
        )


def allowed_by(call: AttentionCall) -> Tensor:
    """Return what the queries of a call may attend to, (B or 1, 1, T, S)."""
    if call.mask is not None:
        return call.mask if call.mask.dtype == torch.bool else call.mask == 0
    new, width = call.query.shape[2], call.key.shape[2]
    allowed = torch.ones(new, width, dtype=torch.bool, device=call.key.device)
    return (allowed.tril(width - new) if call.causal else allowed)[None, None]


def mask_for(call: AttentionCall, allowed: Tensor) -> Tensor:
    """Return a boolean mask as a call's attention function takes it."""
    if call.implementation == "sdpa":
        return allowed
    hidden = max(torch.finfo(call.query.dtype).min, -1e30)  # finite in eager softmax, which is float32
    return torch.zeros(allowed.shape, dtype=call.query.dtype, device=allowed.device).masked_fill(~allowed, hidden)


def check_masks(model: PreTrainedModel, what: str) -> None:
    """Refuse an attention implementation that takes no mask."""
    kind = model.config.get_text_config()._attn_implementation or "eager"
    if kind not in ("sdpa", "eager"):
        raise ValueError(f"{what} needs sdpa or eager attention, which take a mask, got {kind!r}")


def checked_plan(model: PreTrainedModel, what: str) -> ModelPlan:
    """Return the plan of a model that caches keys and values of its own tokens, each layer those of one layer.

    Raises:
        ValueError: it does not; the message says that `what` is not defined for it.

    """
    plan = model_plan(model)
    name = f"{type(model).__name__} ({plan.type})"
    if not plan.caches or not model.can_generate():
        raise ValueError(f"{name} keeps no KV cache, so {what} is not defined for it")
    if field(model.config.get_text_config(), "kv_lora_rank"):
        raise ValueError(f"{name} caches latents of keys and values; {what} needs those of each head")
    if plan.plan.beyond_sharing:
        raise ValueError(f"{name}: {plan.plan.beyond_sharing}; {what} is not defined for that")
    for layer, states in enumerate(plan.layers):
        more = states.every or states.index or states.passes > 1 or states.fixed or states.fixed_float32
        if plan.plan.attends(layer) and more:
            raise ValueError(f"{name}: layer {layer} has {states.mask}; {what} needs keys and values of each token")
        several = [state for state in CACHED if plan.plan.read_count(state, layer) > 1]
        if plan.plan.value_shares[layer] < 1 or several:
            raise ValueError(f"{name}: layer {layer} reads states of several layers; {what} is not defined for that")
    return plan


def _check(model: PreTrainedModel, bits: KvBits) -> ModelPlan:
    """Return the plan of a model, if a quantised cache is defined for it."""
    plan = checked_plan(model, "a quantised KV cache")
    layers = enumerate(plan.layers)
    quantisable = [layer for layer, states in layers if plan.plan.stored(layer) and states.window is None]
    bits.check_layers(quantisable, len(plan.layers))
    return plan

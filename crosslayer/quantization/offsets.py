"""What the bias of a key projection adds to every key, which a quantised cache subtracts before it rounds.

Rotary positions turn the bias with the key, so that keys keep a mean, which may exceed their spread fiftyfold and makes
the steps of codes as much larger. It depends on the position n alone, and is the key of a hidden state of zeros:

    o(n) = b cos(nθ) + b' sin(nθ),    b' = b turned by a quarter

b, b' and θ are read from the attention calls of passes over zeros in which cos and sin are exchanged. So no name or
layout of a model family matters; a layer whose keys do not follow the equation has no offset.

Shapes: B batch, T tokens, H_kv key-value heads, D head size, R channels of the tables of cos and sin.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.probe.intercept import AttentionCall, layer_stack, visited
from crosslayer.quantization.codec import rotated, work_dtype

TOKENS = 8  # positions at which the equation is checked
TOLERANCE = 0.02  # of the largest number: positions may be computed in bfloat16
Tables = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of cos and sin (1, T, R), what replaces them


@dataclass(frozen=True)
class KeyOffset:
    """What a bias adds to the keys of a layer: `still` where cos = 1, `turned` where sin = 1, both (H_kv, 1, D).

    `angles` holds how far each of the D channels turns from one position to the next, in radians.
    """

    still: Tensor
    turned: Tensor
    angles: tuple[float, ...]

    def at(self, positions: Tensor) -> Tensor:
        """Return the offsets (B or 1, H_kv, T, D) of positions (B or 1, T), in rotated channels."""
        longest = 1 << int(positions.max()).bit_length()
        cos, sin = (table[positions][:, None] for table in _turns(self.angles, longest, positions.device))
        return rotated(self.still * cos + self.turned * sin)


@lru_cache(maxsize=4)
def _turns(angles: tuple[float, ...], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos(nθ) and sin(nθ), (length, D) each."""
    turns = torch.arange(length, device=device)[:, None] * torch.tensor(angles, device=device)
    return turns.cos(), turns.sin()


@torch.no_grad()
def key_offsets(model: PreTrainedModel) -> dict[int, KeyOffset]:
    """Return the offsets of the keys that layers read, by layer; four passes over eight tokens if there are biases."""
    if not any(name.endswith("bias") for name, _ in layer_stack(model).named_parameters()):
        return {}
    modules = {call.module for call in _calls(model, set(), lambda *tables: tables).values()}
    read = _calls(model, modules, lambda *tables: tables)
    by_quarter = _calls(model, modules, lambda cos, _: (0 * cos, cos[:, :1].expand_as(cos)))  # cos(0) may be scaled
    by_sine = _calls(model, modules, lambda cos, sin: (0 * cos, sin[:, 1:2].expand_as(cos)))
    rates = [each.float().cpu() for name, each in model.named_buffers() if name.endswith("inv_freq")]
    offsets = {}
    for layer, call in read.items():
        keys = [one[layer].key[0, :, :1].to(work_dtype(call.key.dtype)) for one in (read, by_quarter, by_sine)]
        still, turned, smaller = keys  # (H_kv, 1, D)
        sines = (smaller.abs().sum(0) / turned.abs().sum(0))[0].float().cpu()  # (D,), 1 where a channel does not turn
        angles = torch.where(sines < 0.9, sines.asin(), 0)
        if rates:  # as precise as they are, in a model of bfloat16, too
            nearest = torch.cat(rates)[(torch.cat(rates)[:, None].log() - angles.log()).abs().argmin(0)]
            angles = torch.where(angles > 0, nearest, angles)
        offset, wanted = KeyOffset(still, turned, tuple(angles.tolist())), rotated(call.key)
        gap = offset.at(torch.arange(TOKENS, device=wanted.device)[None]) - wanted
        if wanted.any() and gap.abs().max() <= TOLERANCE * wanted.abs().max():
            offsets[layer] = offset
    return offsets


def _calls(model: PreTrainedModel, modules: set[nn.Module], tables: Tables) -> dict[int, AttentionCall]:
    """Return the attention calls of a pass by layer; `modules` read zeros, and other tables of cos and sin."""

    def with_zeros(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        changed = {name: _zeros(kwargs[name]) for name in ("hidden_states", "inputs") if name in kwargs}
        if isinstance(kwargs.get("position_embeddings"), tuple):
            changed["position_embeddings"] = tables(*kwargs["position_embeddings"])
        return _zeros(args[:1]) + args[1:], {**kwargs, **changed}

    calls: dict[int, AttentionCall] = {}
    hooks = [module.register_forward_pre_hook(with_zeros, with_kwargs=True) for module in modules]
    try:
        with visited(model, lambda call: calls.update({call.layer: call})):
            model(torch.zeros(1, TOKENS, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _zeros(states: Any) -> Any:
    """Return states, or a tuple of them, as zeros."""
    if isinstance(states, tuple):
        return tuple(map(_zeros, states))
    return torch.zeros_like(states) if isinstance(states, Tensor) else states

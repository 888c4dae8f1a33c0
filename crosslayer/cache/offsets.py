"""What the keys of a layer have in common, which a quantized cache subtracts before it rounds.

The bias of a key projection, or the weight of a norm of keys, gives keys a mean that may exceed their spread 180-fold,
and makes the steps of codes as much larger. Rotary positions turn the mean with the key. At position n it is

    o(n) = m cos(nθ) + m' sin(nθ),    m' = m turned by a quarter

m is the mean over a text of random tokens, which is near enough to the mean over any text. The first token has keys of
its own in many models, takes no part in the mean, and stays exact in a cache. m, m' and θ are read from the attention
calls of passes in which cos and sin are exchanged, so that no name or layout of a model family matters; a layer whose
keys do not follow the equation has no offset.

Shapes: B batch, T tokens, H_kv key-value heads, D head size, R channels of the tables of cos and sin.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.cache.quantizers import rotated, work_dtype
from crosslayer.probe.intercept import AttentionCall, evaluating, visited

TOKENS = 32  # of the random text
TOLERANCE = 0.02  # of the largest number: positions may be computed in bfloat16
Tables = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of cos and sin (1, T, R), what replaces them


@dataclass(frozen=True)
class KeyOffset:
    """The mean key of a layer: `still` where cos = 1, `turned` where sin = 1, both (H_kv, 1, D).

    `angles` holds how far each of the D channels turns from one position to the next, in radians; `excess` is the
    largest ratio, over heads, of the mean's energy to that of the deviations from it.
    """

    still: Tensor
    turned: Tensor
    angles: tuple[float, ...]
    excess: float

    def at(self, positions: Tensor) -> Tensor:
        """Return the offsets (B or 1, H_kv, T, D) of positions (B or 1, T), in rotated channels."""
        return rotated(_turned(self.still, self.turned, self.angles, positions))


def _turned(still: Tensor, turned: Tensor, angles: tuple[float, ...], positions: Tensor) -> Tensor:
    """Return keys (H_kv, T or 1, D) and the same turned by a quarter at positions (B or 1, T), (B or 1, H_kv, T, D)."""
    longest = 1 << int(positions.max()).bit_length()
    cos, sin = (table[positions][:, None] for table in _turns(angles, longest, positions.device))
    return still * cos + turned * sin


@lru_cache(maxsize=4)
def _turns(angles: tuple[float, ...], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos(nθ) and sin(nθ), (length, D) each."""
    turns = torch.arange(length, device=device)[:, None] * torch.tensor(angles, device=device)
    return turns.cos(), turns.sin()


@torch.no_grad()
def key_offsets(model: PreTrainedModel) -> dict[int, KeyOffset]:
    """Return the offsets of the keys that layers read, by layer; four passes over `TOKENS` tokens, or five."""
    passes = _Passes(model)
    read = passes.keys(lambda cos, sin: (cos, sin))
    still = passes.keys(lambda cos, _: (cos[:, :1].expand_as(cos), 0 * cos))  # cos(0) may be scaled
    turned = passes.keys(lambda cos, _: (0 * cos, cos[:, :1].expand_as(cos)))
    smaller = passes.keys(lambda cos, sin: (0 * cos, sin[:, 1:2].expand_as(cos)))
    tables = [each.float().cpu() for name, each in model.named_buffers() if name.endswith("inv_freq")]
    positions = torch.arange(TOKENS, device=model.device)[None]
    offsets = {}
    for layer, keys in read.items():
        sines = smaller[layer].abs().sum((0, 1)) / turned[layer].abs().sum((0, 1))  # (D,), 1 where nothing turns
        angles = _exactly(torch.where(sines < 0.9, sines.asin(), 0).float().cpu(), tables)
        predicted = _turned(still[layer], turned[layer], angles, positions.to(keys.device))[0]
        if layer in passes.known and _close(keys, predicted):
            own, by_quarter = (states[:, 1:].mean(1, keepdim=True) for states in (still[layer], turned[layer]))
            deviations = (still[layer][:, 1:] - own).square().mean(1).sum(-1)  # (H_kv,)
            excess = own.square().sum((1, 2)) / deviations
            offsets[layer] = KeyOffset(own, by_quarter, angles, float(excess.max()))
    return offsets


def _exactly(measured: Tensor, tables: Iterable[Tensor]) -> tuple[float, ...]:
    """Return measured angles (D,) as the nearest of a model's tables has them: exactly, in bfloat16 too."""
    turning, nearest = measured > 0, {}
    for table in tables:
        ratios = (table[:, None] / measured[turning]).log().abs()  # (angles, channels that turn)
        closest, index = ratios.min(0)
        nearest[float(closest.sum())] = table[index]
    angles = measured.clone()
    if nearest:
        angles[turning] = nearest[min(nearest)]
    return tuple(angles.tolist())


class _Passes:
    """Passes over random tokens in which attention modules read the same hidden states, with other cos and sin.

    A module without such tables may turn keys by itself, which shows if one state has different keys at two positions.
    `known` holds the layers that do not.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        size, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
        self.text = torch.randint(size, (1, TOKENS), generator=generator).to(model.device)
        self.states: dict[nn.Module, dict[str | int, Any]] = {}  # of each module, by name or index of the argument
        self.rotary: set[nn.Module] = set()  # modules with tables
        modules = {layer: call.module for layer, call in self._calls(self.text[:, :1]).items()}
        self._calls(self.text, modules.values(), self._note)
        self.known = {layer for layer, module in modules.items() if module in self.rotary}
        if len(self.known) < len(modules):
            repeated = self.keys(lambda cos, sin: (cos, sin), first_alone=True)
            self.known |= {layer for layer, keys in repeated.items() if _close(keys, keys[:, :1])}

    def keys(self, tables: Tables, first_alone: bool = False) -> dict[int, Tensor]:
        """Return the keys of layers, (H_kv, T, D) each, with other tables; with the first token's state alone if so."""

        def replay(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            states = self.states[module]
            if first_alone:
                states = {
                    name: _map(lambda state: state[:, :1].expand_as(state), held) for name, held in states.items()
                }
            changed = {name: states.get(name, value) for name, value in kwargs.items()}
            if module in self.rotary:
                changed["position_embeddings"] = tables(*kwargs["position_embeddings"])
            return tuple(states.get(index, value) for index, value in enumerate(args)), changed

        calls = self._calls(self.text, self.states, replay)
        return {layer: call.key[0].to(work_dtype(call.key.dtype)) for layer, call in calls.items()}

    def _note(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep the hidden states that a module is called with."""
        named = {name: kwargs[name] for name in ("hidden_states", "inputs") if kwargs.get(name) is not None}
        self.states[module] = {**dict(enumerate(args[:1])), **named}
        if isinstance(kwargs.get("position_embeddings"), tuple):
            self.rotary.add(module)

    def _calls(
        self, text: Tensor, modules: Iterable[nn.Module] = (), hook: Callable[..., Any] | None = None
    ) -> dict[int, AttentionCall]:
        """Return the attention calls of a pass by layer; `hook` sees the arguments of these modules first."""
        calls: dict[int, AttentionCall] = {}
        hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules] if hook else []
        try:
            with evaluating(self.model), visited(self.model, lambda call: calls.update({call.layer: call})):
                self.model.base_model(text, use_cache=False)
        finally:
            for handle in hooks:
                handle.remove()
        return calls


def _map(function: Callable[[Tensor], Tensor], states: Any) -> Any:
    """Apply a function to states, or to each of a tuple of them."""
    return tuple(map(function, states)) if isinstance(states, tuple) else function(states)


def _close(keys: Tensor, others: Tensor) -> bool:
    """Return whether keys differ by at most `TOLERANCE` of the largest number."""
    return bool((keys - others).abs().max() <= TOLERANCE * keys.abs().max())

"""What the keys of a layer have in common, which a quantized cache subtracts before it rounds; how positions turn keys.

The bias of a key projection, or the weight of a norm of keys, gives keys a mean that may exceed their spread 180-fold,
and makes the steps of codes as much larger. It is the mean over a text of random tokens, before rotary positions turn
it, which is near enough to the mean over any text. The first token has keys of its own in many models, takes no part
in the mean, and stays exact in a cache. A layer whose keys turn in another way than by a table of the model has no
offset.

The angles of one position are in buffers of the model, but which layer uses which buffer, and which channels turn
together, has no common name. The keys of one hidden state at several positions tell: they differ by the rotation alone.

Shapes: B batch, T tokens, P positions, H_kv key-value heads, D head size, R channels that turn.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.cache.quantizers import rotated
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.model import evaluating

ORDERS = ("halves", "pairs")  # channel i turns with i + R/2, or with its neighbor
# Of the random text. On Gemma 3 270M, 4 bits have a KL of 0.011 nats without a mean, 0.0058 with that of 32 random
# tokens, 0.0042 with that of 256, and 0.0032 with that of text: so no calibration text is needed.
TOKENS = 32
REPEATED = 1  # the token whose hidden state is read at all positions; the first may have a few numbers far larger
TOLERANCE = 0.02  # of the largest number: positions may be computed in bfloat16


@dataclass(frozen=True)
class Rotation:
    """The angles of one position in radians, of each pair of channels that turns, and their order, one of `ORDERS`.

    Without angles nothing turns.
    """

    angles: tuple[float, ...] = ()
    order: str = ORDERS[0]

    def apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return keys (…, T, D) turned by cosines and sines (…, T, R/2); with −`sin` they are turned back."""
        if not self.angles:
            return keys
        count = 2 * len(self.angles)
        if self.order == "halves":
            first, second = slice(0, count // 2), slice(count // 2, count)
        else:
            first, second = slice(0, count, 2), slice(1, count, 2)
        x, y = keys[..., first], keys[..., second]
        out = torch.empty_like(keys) if count == keys.shape[-1] else keys.clone()  # other channels stay
        torch.mul(x, cos, out=out[..., first]).addcmul_(y, sin, value=-1)
        torch.mul(y, cos, out=out[..., second]).addcmul_(x, sin)
        return out


@lru_cache(maxsize=8)  # all layers of a model mostly have the same angles
def turns(angles: tuple[float, ...], start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the positions from `start` to `stop`, (T, R/2) each, in float32."""
    # in float32, an angle at position 8,192 would be off by up to 0.0005
    radians = torch.arange(start, stop, dtype=torch.float64)[:, None] * torch.tensor(angles, dtype=torch.float64)
    return radians.cos().float().to(device), radians.sin().float().to(device)


def angle_tables(model: nn.Module) -> list[tuple[float, ...]]:
    """Return the tables of angles among a model's buffers, each once."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1]
    return list(dict.fromkeys(tuple(buffer.double().tolist()) for buffer in buffers))


def find_rotation(
    keys: Tensor, positions: Sequence[int], tables: Sequence[tuple[float, ...]], tolerance: float
) -> Rotation | None:
    """Return the rotation that the keys of one hidden state, (…, P, D) in float32, differ by; None if no table fits.

    `positions` begin with 0. `tolerance` is what keys may differ from it, as a share of the largest number.
    """
    still = keys[..., :1, :]
    best = None
    least = tolerance * float(still.abs().max())
    # no rotation comes first; a later candidate takes its place if it is as near
    for candidate in (Rotation(), *(Rotation(table, order) for table in tables for order in ORDERS)):
        if 2 * len(candidate.angles) > keys.shape[-1]:
            continue
        cos, sin = turns(candidate.angles, 0, max(positions) + 1, keys.device)
        cos, sin = cos[list(positions)], sin[list(positions)]
        error = float((candidate.apply(still.expand_as(keys), cos, sin) - keys).abs().max())
        if error <= least:
            best, least = candidate, error
    return best


@dataclass(frozen=True)
class KeyOffset:
    """The mean key of a layer before rotation, (H_kv, 1, D), and how positions turn it.

    `excess` is the largest ratio, over heads, of the mean's energy to that of the deviations from it.
    """

    mean: Tensor
    rotation: Rotation
    excess: float

    def at(self, positions: Tensor) -> Tensor:
        """Return the offsets (B or 1, H_kv, T, D) of positions (B or 1, T), in rotated channels."""
        longest = 1 << int(positions.max()).bit_length()  # so that a growing text seldom needs another table
        cos, sin = turns(self.rotation.angles, 0, longest, positions.device)
        cos, sin = cos[positions][:, None], sin[positions][:, None]
        means = self.mean.expand(len(positions), -1, positions.shape[1], -1)
        return rotated(self.rotation.apply(means, cos, sin))


@torch.no_grad()
def key_offsets(model: PreTrainedModel) -> dict[int, KeyOffset]:
    """Return the offsets of the keys that layers read, by layer; three passes over at most `TOKENS` tokens."""
    text, repeated = _keys(model)
    tables, positions = angle_tables(model), [*range(TOKENS)]
    offsets = {}
    for layer, keys in text.items():
        rotation = find_rotation(repeated[layer], positions, tables, TOLERANCE)
        if rotation is not None:
            cos, sin = turns(rotation.angles, 0, TOKENS, keys.device)
            still = rotation.apply(keys, cos, -sin)[:, 1:]  # the first token's key lies far from the mean
            mean = still.mean(1, keepdim=True)
            deviations = (still - mean).square().mean(1).sum(-1)  # (H_kv,)
            offsets[layer] = KeyOffset(mean, rotation, float((mean.square().sum((1, 2)) / deviations).max()))
    return offsets


def _keys(model: PreTrainedModel) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return the keys of layers (H_kv, T, D) over random tokens, and those of one token's hidden states, repeated."""
    size, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    text = torch.randint(size, (1, TOKENS), generator=generator).to(model.device)
    states: dict[nn.Module, dict[str | int, Any]] = {}  # of each module, by name or index of the argument

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        named = {name: kwargs[name] for name in ("hidden_states", "inputs") if kwargs.get(name) is not None}
        states[module] = {**dict(enumerate(args[:1])), **named}

    def repeat(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        repeated = {name: _repeated(state) for name, state in states[module].items()}
        changed = {name: repeated.get(name, value) for name, value in kwargs.items()}
        return tuple(repeated.get(index, value) for index, value in enumerate(args)), changed

    # a pass over one token says which modules attend; a second notes what they read, a third repeats one token of it
    modules = [call.module for call in _calls(model, text[:, :1]).values()]
    passes = [_calls(model, text, modules, hook) for hook in (note, repeat)]
    text_keys, repeated_keys = (
        {layer: call.key[0].to(torch.promote_types(call.key.dtype, torch.float32)) for layer, call in calls.items()}
        for calls in passes
    )
    return text_keys, repeated_keys


def _repeated(states: Any) -> Any:
    """Return a token's hidden state (1, T, …) at all positions, or that of each of a tuple of them."""
    if isinstance(states, tuple):
        return tuple(map(_repeated, states))
    return states[:, REPEATED : REPEATED + 1].expand_as(states)


def _calls(
    model: PreTrainedModel, text: Tensor, modules: Iterable[nn.Module] = (), hook: Callable[..., Any] | None = None
) -> dict[int, AttentionCall]:
    """Return the attention calls of a pass by layer; `hook` sees the arguments of these modules first."""
    calls: dict[int, AttentionCall] = {}
    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules] if hook else []
    try:
        with evaluating(model), visited(model, lambda call: calls.update({call.layer: call})):
            model.base_model(text, use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    return calls

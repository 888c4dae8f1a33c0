"""What the keys of a layer have in common, which a quantized cache subtracts before it rounds.

The bias of a key projection, or the weight of a norm of keys, gives keys a mean that may exceed their spread 180-fold,
and makes the steps of codes as much larger. It is the mean over a text of random tokens, before rotary positions turn
it, which is near enough to the mean over any text. The first token has keys of its own in many models, takes no part
in the mean, and stays exact in a cache. A layer whose keys turn in another way than by a table of the model has no
offset.

Shapes: B batch, T tokens, H_kv key-value heads, D head size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.cache.quantizers import rotated, work_dtype
from crosslayer.cache.rotation import Rotation, angle_tables, find_rotation
from crosslayer.probe.intercept import AttentionCall, evaluating, visited

TOKENS = 32  # of the random text
REPEATED = 1  # the token whose hidden state is read at all positions; the first may have a few numbers far larger
TOLERANCE = 0.02  # of the largest number: positions may be computed in bfloat16


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
        longest = 1 << int(positions.max()).bit_length()
        cos, sin = (turns[positions][:, None] for turns in self.rotation.turns(0, longest, positions.device))
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
            cos, sin = rotation.turns(0, TOKENS, keys.device)
            still = rotation.apply(keys, cos, -sin)[:, 1:]
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
        own = {name: _repeated(state) for name, state in states[module].items()}
        changed = {name: own.get(name, value) for name, value in kwargs.items()}
        return tuple(own.get(index, value) for index, value in enumerate(args)), changed

    modules = [call.module for call in _calls(model, text[:, :1]).values()]
    passes = [_calls(model, text, modules, hook) for hook in (note, repeat)]
    keys = [{layer: call.key[0].to(work_dtype(call.key.dtype)) for layer, call in calls.items()} for calls in passes]
    return keys[0], keys[1]


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

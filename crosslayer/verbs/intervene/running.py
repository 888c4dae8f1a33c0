"""Token positions and editable masks in a running forward pass.

Positions count tokens from 0, including tokens in the cache, without left padding.
Shapes: B rows of the batch, H heads, T new tokens, S cached and new tokens, the keys.
"""

from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from crosslayer.core.transformers_versions import given_cache
from crosslayer.probe.intercept import AttentionCall


@dataclass(eq=False)
class Running:
    """The running forward pass, and which interventions have reached their positions.

    A position in a batch is a list of pairs (row of the batch, index). Interventions are identified by their `id`.
    """

    cached: int = 0  # tokens in the cache
    passes: int = 0  # forward passes so far
    preallocated: bool = False  # whether the cache also has keys for later tokens
    mask: Tensor | None = None  # (B, S), False for padding
    padding: tuple[int, ...] = (0,)  # tokens of left padding, by row, or one number for all
    reached: set[tuple[int, int]] = field(default_factory=set)  # id of an intervention, position
    rows: dict[int, Tensor] = field(default_factory=dict)  # original rows of the position table

    def begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Read from the arguments of the model how many tokens are cached and how far each row is left-padded."""
        arguments = signature(module.forward).bind_partial(*args, **kwargs).arguments
        arguments = {**arguments, **arguments.get("kwargs", {})}
        cache, mask, positions = given_cache(arguments), arguments.get("attention_mask"), arguments.get("position_ids")
        self.passes += 1
        self.cached = 0 if cache is None else int(cache.get_seq_length())
        self.preallocated = isinstance(cache, Cache) and cache.is_compileable
        self.mask, self.padding = None, (0,)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.mask = mask != 0  # (B, S)
            self.padding = tuple((mask.cumsum(-1) == 0).sum(-1).tolist())
        elif isinstance(positions, Tensor) and positions.dim() == 2:
            # With a static cache transformers hands on a 4-D mask. How far a row is padded then shows in the last
            # position id, since the first ones are clamped to 0.
            self.padding = tuple((self.cached + positions.shape[1] - 1 - positions[:, -1]).tolist())

    def new_tokens(self, intervention: object, position: int, batch: int, new: int) -> list[tuple[int, int]]:
        """Return (row, index among the `new` tokens) for each row that has this position among its new tokens."""
        return self._indices(intervention, position, batch, self.cached, self.cached + new)

    def keys(self, intervention: object, position: int, call: AttentionCall) -> list[tuple[int, int]]:
        """Return (row, index among the keys of the call) for each row that has this position."""
        batch, _, new, _ = call.query.shape
        return self._indices(intervention, position, batch, self.cached - self.offset(call), self.cached + new)

    def offset(self, call: AttentionCall) -> int:
        """Return the index of the first new token among the keys of a call: cached tokens, less those evicted."""
        tokens, keys = self.cached + call.query.shape[2], call.key.shape[2]
        if keys > tokens and not self.preallocated:
            raise ValueError(
                f"layer {call.layer} attends to {keys} keys of {tokens} tokens: an intervention would change only one "
                "of the keys of a token"
            )
        # a sliding cache has evicted the oldest keys
        return self.cached - max(0, tokens - keys)

    def _indices(self, intervention: object, position: int, batch: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return (row, index − start) of a position for each row that has a token there, from `start` to `stop`."""
        if not self.passes:
            raise ValueError("the layers run outside of their base model, so positions are unknown; run the base model")
        padding = self.padding * batch if len(self.padding) == 1 else self.padding
        indices = []
        for row, before in enumerate(padding):
            index = position + before  # among cached and new tokens
            real = self.mask is None or (index < self.mask.shape[1] and self.mask[row % len(self.mask), index])
            if real and start <= index < stop:
                indices.append((row, index - start))
        if indices:
            self.reached.add((id(intervention), position))
        return indices


def added_mask(call: AttentionCall, running: Running) -> Tensor:
    """Return an editable copy of the mask of a call, to be added to the scores: (B, 1 or H, T, S)."""
    batch, _, new, _ = call.query.shape
    size, device = call.key.shape[2], call.query.device
    mask = call.tensor_mask
    if mask is None:
        mask = torch.ones(1, 1, new, size, dtype=torch.bool, device=device)
        if call.causal:
            mask = mask.tril(max(0, min(running.cached, size - new)))
    if mask.dtype == torch.bool:
        scores = torch.zeros(mask.shape, dtype=call.query.dtype, device=device)
        mask = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    return mask.expand(batch, *mask.shape[1:]).clone()  # (1 or B, …) → (B, …)

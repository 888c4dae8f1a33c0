"""Where the tokens of the running forward pass stand.

Positions count tokens from 0: padding on the left is not counted, and tokens in the cache are.
Shapes: B rows of the batch, T new tokens, S cached and new tokens.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from crosslayer.probe.intercept import AttentionCall


class Running:
    """The forward pass that is running, and which interventions have met their positions.

    A place is a pair (row of the batch, index). Interventions are told apart by their `id`.
    """

    def __init__(self):
        self.cached, self.passes = 0, 0  # tokens in the cache; forward passes so far
        self.has_room = False  # whether the cache holds room for later tokens
        self.mask: Tensor | None = None  # (B, S), False where a token is padding
        self.padding: list[int] = [0]  # tokens of padding on the left, for each row, or a single number for all
        self.reached: set[tuple[int, int]] = set()  # id of an intervention, position
        self.rows: dict[int, Tensor] = {}  # of the position table, as they were

    def begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Read from the body's arguments how many tokens are cached and how far each row is padded on the left."""
        named = signature(module.forward).bind_partial(*args, **kwargs).arguments
        named = {**named, **named.get("kwargs", {})}
        cache, mask, positions = (named.get(k) for k in ("past_key_values", "attention_mask", "position_ids"))
        self.passes += 1
        self.cached = 0 if cache is None else int(cache.get_seq_length())
        self.has_room = isinstance(cache, Cache) and cache.is_compileable
        self.mask, self.padding = None, [0]
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.mask = mask != 0  # (B, S)
            self.padding = (mask.cumsum(-1) == 0).sum(-1).tolist()
        elif isinstance(positions, Tensor) and positions.dim() == 2:  # padding clamps the first ones
            self.padding = (self.cached + positions.shape[1] - 1 - positions[:, -1]).tolist()

    def new_tokens(self, intervention: object, position: int, batch: int, new: int) -> list[tuple[int, int]]:
        """Return (row, index among the `new` tokens) of each row that is running this position now."""
        places = []
        for row, index in self._places(position, batch):
            if 0 <= index - self.cached < new:
                places.append((row, index - self.cached))
        if places:
            self.reached.add((id(intervention), position))
        return places

    def keys(self, intervention: object, position: int, call: AttentionCall) -> list[tuple[int, int]]:
        """Return (row, index among the call's keys) of a position."""
        gone = self.gone(call)
        places = []
        for row, index in self._places(position, call.query.shape[0]):
            if gone <= index < self.cached + call.query.shape[2]:
                places.append((row, index - gone))
        if places:
            self.reached.add((id(intervention), position))
        return places

    def gone(self, call: AttentionCall) -> int:
        """Return how many of the oldest keys a sliding cache no longer holds.

        Raises:
            ValueError: there are more keys than tokens: those of another layer too, or compressed entries.

        """
        tokens, keys = self.cached + call.query.shape[2], call.key.shape[2]
        if keys > tokens and not self.has_room:
            raise ValueError(
                f"layer {call.layer} attends to {keys} keys of {tokens} tokens: an intervention on a token's own key "
                "would not reach all that stands for it"
            )
        return max(0, tokens - keys)

    def real(self, row: int, new: int) -> Tensor:
        """Return which of a row's new tokens are no padding, (T,)."""
        if self.mask is None:
            return torch.ones(new, dtype=torch.bool)
        return self.mask[row % len(self.mask), self.cached : self.cached + new].cpu()

    def _places(self, position: int, batch: int) -> list[tuple[int, int]]:
        """Return (row, index among cached and new tokens) of a position wherever it is a real token."""
        if not self.passes:
            raise ValueError("this model runs its layers without its body, so positions are not known; use the body")
        padding = self.padding * batch if len(self.padding) == 1 else self.padding
        places = []
        for row, before in enumerate(padding):
            index = position + before
            if self.mask is None or (index < self.mask.shape[1] and self.mask[row % len(self.mask), index]):
                places.append((row, index))
        return places

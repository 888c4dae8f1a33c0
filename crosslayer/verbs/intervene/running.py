"""Where the tokens of the running forward pass stand, and what its masks are while they are edited.

Positions count tokens from 0: padding on the left is not counted, and tokens in the cache are.
Shapes: B rows of the batch, H heads, T new tokens, S cached and new tokens, the keys.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers import Cache

from crosslayer.probe.intercept import AttentionCall

FLEX_BLOCK = 128  # rows and keys that flex attention's kernels take at once


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
        return self._places(intervention, position, batch, self.cached, self.cached + new)

    def keys(self, intervention: object, position: int, call: AttentionCall) -> list[tuple[int, int]]:
        """Return (row, index among the call's keys) of a position."""
        batch, _, new, _ = call.query.shape
        return self._places(intervention, position, batch, self.gone(call), self.cached + new)

    def gone(self, call: AttentionCall) -> int:
        """Return how many of the oldest keys a sliding cache no longer holds."""
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

    def _places(self, intervention: object, position: int, batch: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return (row, index − start) of a position wherever it is a real token from `start` to `stop`."""
        if not self.passes:
            raise ValueError("this model runs its layers without its body, so positions are not known; use the body")
        padding = self.padding * batch if len(self.padding) == 1 else self.padding
        places = []
        for row, before in enumerate(padding):
            index = position + before  # among cached and new tokens
            seen = self.mask is None or (index < self.mask.shape[1] and self.mask[row % len(self.mask), index])
            if seen and start <= index < stop:
                places.append((row, index - start))
        if places:
            self.reached.add((id(intervention), position))
        return places


def added_mask(call: AttentionCall, running: Running) -> Tensor:
    """Return a copy of the call's mask that may be edited, as what is added to the scores: (B, 1 or H, T, S)."""
    batch, _, new, _ = call.query.shape
    size, device = call.key.shape[2], call.query.device
    mask: Any = call.mask
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, batch, None, new, size, device=str(device))  # (B, 1, T, S)
    elif mask is None:
        mask = torch.ones(1, 1, new, size, dtype=torch.bool, device=device)
        if call.causal:
            mask = mask.tril(max(0, min(running.cached, size - new)))
    if mask.dtype == torch.bool:
        scores = torch.zeros(mask.shape, dtype=call.query.dtype, device=device)
        mask = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    return mask.expand(batch, *mask.shape[1:]).clone()  # (1 or B, …) → (B, …)


def as_taken(call: AttentionCall, mask: Tensor) -> Any:
    """Return an edited mask as the call's attention takes it: SDPA and eager add it, flex has a kind of its own."""
    if "flex" not in call.implementation:
        return mask
    batch, _, new, size = mask.shape
    # flex attention's kernels look at whole blocks, also beyond the last row and key
    allowed = torch.nn.functional.pad(mask[:, 0] == 0, (0, -size % FLEX_BLOCK, 0, -new % FLEX_BLOCK))  # (B, T', S')

    def may_see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return allowed[row, query, key]

    return create_block_mask(may_see, batch, None, new, size, device=str(mask.device))

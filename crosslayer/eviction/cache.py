"""A cache of transformers from which tokens go: room for those that stay and for the next block.

Shapes: B batch, T new tokens, S cached + new tokens, W tokens that stay, H_kv key-value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from crosslayer.eviction.eviction import BLOCK
from crosslayer.eviction.state import GroupState


class EvictionLayer(CacheLayerMixin):
    """What a layer stores, in memory that is allocated a block ahead; empty where it stores nothing."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.used, self.seen = 0, 0  # columns that are filled, tokens so far

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type and device of the states; memory comes with the first of them."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append new states (B, H_kv, T, D); return all that are stored, (B, H_kv, S, D), without a copy."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.used + key_states.shape[2]
        if end > self.keys.shape[2]:
            rows = -(-end // BLOCK) * BLOCK
            self.keys, self.values = _grown(self.keys, self.used, rows), _grown(self.values, self.used, rows)
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used, self.seen = end, self.seen + key_states.shape[2]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, columns: Tensor, room: int) -> None:
        """Let all but some columns (B, H_kv, W) go, in new memory for `room` of them."""
        assert self.keys is not None and self.values is not None
        columns = columns.to(self.keys.device)  # layers of a group may lie on several devices
        self.keys, self.values = _gathered(self.keys, columns, room), _gathered(self.values, columns, room)
        self.used = columns.shape[-1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return that masks are as wide as the text."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens the text has so far."""
        return self.seen

    def get_max_length(self) -> int:
        """Return that there is no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized, self.used, self.seen = False, 0, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows of the batch, in their order, or some of them several times."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[indices], self.values[indices]

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget the last tokens: what went for their sake does not come back."""
        raise ValueError("a cache from which tokens were evicted cannot be cropped, as assisted generation needs it")


def _grown(states: Tensor, used: int, rows: int) -> Tensor:
    batch, heads, _, size = states.shape
    grown = states.new_empty((batch, heads, rows, size))
    grown[:, :, :used] = states[:, :, :used]
    return grown


def _gathered(states: Tensor, columns: Tensor, room: int) -> Tensor:
    """Return columns (B, H_kv, W) of states, in memory for `room` of them."""
    batch, heads, width = columns.shape
    kept = states.new_empty((batch, heads, max(room, width), states.shape[-1]))
    index = columns[..., None].expand(-1, -1, -1, states.shape[-1])
    torch.gather(states, 2, index, out=kept[:, :, :width])
    return kept


class EvictionCache(Cache):
    """The cache of a run from which tokens go, made by `evicting`.

    `groups` hold what is known of the cached tokens, by group of layers that share keys or values; no use of `evicting`
    but `run` takes the cache.
    """

    def __init__(self, layers: int, groups: list[GroupState], run: object) -> None:
        self.states = [EvictionLayer() for _ in range(layers)]
        super().__init__(layers=list(self.states))
        self.groups, self.run = groups, run

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has seen of the text; of one that stores nothing, what any layer has."""
        state = self.states[layer_idx]
        return state.seen if state.is_initialized else max(layer.seen for layer in self.states)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return that masks are as wide as the text, whatever layer stores it."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        for group in self.groups:
            group.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the batch in another order, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        stored = next((layer.keys for layer in self.states if layer.keys is not None), None)
        if stored is None:
            return
        rows = torch.arange(stored.shape[0], device=stored.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows of the batch, in their order, or some of them several times."""
        super().batch_select_indices(indices)
        for group in self.groups:
            group.select(indices)

    def reduced_texts(self) -> int:
        """Return of how many texts tokens have gone, in any layer."""
        rows = zip(
            *([held < seen for held, seen in zip(g.held, g.seen, strict=True)] for g in self.groups), strict=True
        )
        return sum(any(row) for row in rows)

    def overhead_bytes(self) -> int:
        """Return bytes of positions and attention sums, which stand beside keys and values."""
        return sum(group.overhead_bytes() for group in self.groups)

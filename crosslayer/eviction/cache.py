"""A transformers cache that evicts tokens: it has memory for the kept tokens and for the next block.

Shapes: B batch, T new tokens, S cached + new tokens, W kept tokens, H_kv key-value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from crosslayer.eviction.eviction import BLOCK
from crosslayer.eviction.state import GroupState


class EvictionLayer(CacheLayerMixin):
    """Keys and values of a layer, in memory that is allocated a block ahead; empty where it stores nothing."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.used, self.seen = 0, 0  # columns in use, tokens read so far

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device from the states; `update` allocates memory."""
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

    def keep(self, columns: Tensor, capacity: int) -> None:
        """Evict all but some columns (B, H_kv, W), and move these to new memory for `capacity` columns."""
        assert self.keys is not None and self.values is not None
        columns = columns.to(self.keys.device)  # layers of a group may lie on several devices
        self.keys, self.values = _gathered(self.keys, columns, capacity), _gathered(self.values, columns, capacity)
        self.used = columns.shape[-1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the width of masks, which is that of the whole text, and their offset, 0."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens of the text have been read."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def reset(self) -> None:
        """Empty the cache."""
        self.keys = self.values = None
        self.is_initialized, self.used, self.seen = False, 0, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows of the batch, in this order; a row may occur several times."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[indices], self.values[indices]

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove the last tokens: the tokens that were evicted because of them cannot be restored."""
        raise ValueError("a cache under eviction cannot be cropped, so assisted generation does not work with eviction")


def _grown(states: Tensor, used: int, rows: int) -> Tensor:
    batch, heads, _, size = states.shape
    grown = states.new_empty((batch, heads, rows, size))
    grown[:, :, :used] = states[:, :, :used]
    return grown


def _gathered(states: Tensor, columns: Tensor, capacity: int) -> Tensor:
    """Return columns (B, H_kv, W) of states, in memory for `capacity` columns."""
    batch, heads, width = columns.shape
    kept = states.new_empty((batch, heads, max(capacity, width), states.shape[-1]))
    index = columns[..., None].expand(-1, -1, -1, states.shape[-1])
    torch.gather(states, 2, index, out=kept[:, :, :width])
    return kept


class EvictionCache(Cache):
    """The cache of a model that runs under `evicting`.

    `groups` hold what a policy knows of the cached tokens, by group of layers that share keys or values. `run` is the
    use of `evicting` that made the cache; no other accepts it.
    """

    def __init__(self, layers: int, groups: list[GroupState], run: object) -> None:
        self.states = [EvictionLayer() for _ in range(layers)]
        super().__init__(layers=list(self.states))
        self.groups, self.run = groups, run

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has read; for a layer that stores nothing, how many any layer has."""
        state = self.states[layer_idx]
        return state.seen if state.is_initialized else max(layer.seen for layer in self.states)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the width of masks, which is that of the whole text in any layer, and their offset, 0."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def reset(self) -> None:
        """Empty the cache."""
        super().reset()
        for group in self.groups:
            group.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        stored = next((layer.keys for layer in self.states if layer.keys is not None), None)
        if stored is None:
            return
        rows = torch.arange(stored.shape[0], device=stored.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows of the batch, in this order; a row may occur several times."""
        super().batch_select_indices(indices)
        for group in self.groups:
            group.select(indices)

    def reduced_texts(self) -> int:
        """Return how many texts have lost tokens, in any layer."""
        rows = zip(
            *([held < seen for held, seen in zip(g.held, g.seen, strict=True)] for g in self.groups), strict=True
        )
        return sum(any(row) for row in rows)

    def overhead_bytes(self) -> int:
        """Return the bytes of positions and attention sums, which are stored besides keys and values."""
        return sum(group.overhead_bytes() for group in self.groups)

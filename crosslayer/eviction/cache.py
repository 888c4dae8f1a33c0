"""A transformers cache that evicts tokens: it has memory for the kept tokens and for the next block."""

import torch
from torch import Tensor
from transformers import Cache

from crosslayer.core.columns import ColumnLayer
from crosslayer.eviction.state import GroupState


class EvictionCache(Cache):
    """The cache of a model that runs under `evicting`.

    `groups` hold what a policy knows of the cached tokens, by group of layers that share keys or values. `run` is the
    use of `evicting` that made the cache; no other accepts it.
    """

    def __init__(self, layers: list[ColumnLayer], groups: list[GroupState], run: object) -> None:
        self.states = layers
        super().__init__(layers=list(layers))
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
        texts = len(self.groups[0].seen)
        if texts:
            self.batch_select_indices(torch.arange(texts).repeat_interleave(repeats))

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

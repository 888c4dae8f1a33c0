"""Cross-attention over depth: each layer attends over its own keys and values and those of an earlier layer at once.

    U_n = softmax(Q_n [K_n; K_m]^T / √d) [V_n; V_m]

Both halves have the same mask: a token attends to the same tokens of both layers. Value residuals approximate this
method, which doubles the cost of attention, so it serves as a reference for training comparisons.

Flows: keys and values, as cached. Reads: every layer but the first, its own and those of one earlier layer. Cache:
unchanged. Source: ResFormer (arXiv 2410.17897), Eq. 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crosslayer.core.method import Combined, Config, Method, PerSource, StateReader, Wiring
from crosslayer.core.options import check_choice
from crosslayer.core.plan import DepthPlan

SOURCES = ("first", "previous")


@dataclass(frozen=True)
class CrossAttention(Method):
    """Each layer attends over two layers' tokens at once; FlashAttention is not supported."""

    source: str = "first"
    """The other layer whose keys and values are read: "first" or "previous"."""

    def plan(self, layers: int) -> DepthPlan:
        """Let each layer read another layer's keys and values in addition to its own."""
        check_choice("cross_attention", "source", self.source, SOURCES)
        if layers < 2:
            raise ValueError(f"cross_attention needs at least 2 layers, got {layers}")
        own = tuple(range(layers))
        pairs = [(0 if self.source == "first" else layer - 1, layer) for layer in own[1:]]
        return DepthPlan(own, (0, *pairs), (0, *pairs), own)

    def reader(self, config: Config, wiring: Wiring, layer: int) -> StateReader | None:
        """Concatenate two layers' states in every layer but the first."""
        return None if layer == 0 else _Concatenate()


class _Concatenate(StateReader):
    """Concatenates the tokens of the layers, the layer's own first, as probes expect."""

    needs_mask = True

    def forward(self, keys: PerSource, values: PerSource, mask: Tensor | None, new: int) -> Combined:
        """Return keys and values (B, H_kv, 2·S, D), and the mask (B or 1, 1, T, 2·S) for both halves."""
        tokens = keys[0].shape[2]
        # causal from the first token on: a static cache is empty beyond
        if mask is None and new > 1:
            mask = torch.ones(new, tokens, dtype=torch.bool, device=keys[0].device).tril()[None, None]
        if mask is not None:
            mask = torch.cat([mask[..., :tokens]] * len(keys), dim=-1)
        return torch.cat(keys[::-1], dim=2), torch.cat(values[::-1], dim=2), mask

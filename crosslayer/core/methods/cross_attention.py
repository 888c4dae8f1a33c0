"""Cross-attention over depth: each layer attends over its own keys and values and those of a layer below, in a row.

    U_n = softmax(Q_n [K_n; K_m]^T / √d) [V_n; V_m]

Both halves are masked alike: a token sees the same tokens of either layer. It is what value residuals approximate, at
twice the cost of attention, so it is a reference to train and compare with.

Flows: keys and values, as cached. Reads: every layer but the first, its own and those of one layer below. Cache:
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
    """Each layer attends over two layers' tokens at once; FlashAttention and FlexAttention cannot follow the mask."""

    source: str = "first"
    """The other layer whose keys and values are read: the "first" layer, or the "previous" one."""

    def plan(self, layers: int) -> DepthPlan:
        """Let each layer read another layer's keys and values beside its own."""
        check_choice("cross_attention", "source", self.source, SOURCES)
        if layers < 2:
            raise ValueError(f"cross_attention: the model has {layers} layer; there is no other to read")
        own = tuple(range(layers))
        pairs = [(0 if self.source == "first" else layer - 1, layer) for layer in own[1:]]
        return DepthPlan(own, (0, *pairs), (0, *pairs), own)

    def reader(self, config: Config, wiring: Wiring, layer: int) -> StateReader | None:
        """Put two layers' states in a row in every layer but the first."""
        return None if layer == 0 else _InARow()


class _InARow(StateReader):
    """Puts the tokens of the layers behind one another, the layer's own first, as those who look at it expect."""

    needs_mask = True

    def forward(self, keys: PerSource, values: PerSource, mask: Tensor | None, new: int) -> Combined:
        """Return keys and values (B, H_kv, 2·S, D), and the mask (B or 1, 1, T, 2·S) for both halves."""
        tokens = keys[0].shape[2]
        if mask is None and new > 1:  # causal from the first token on, as SDPA takes it: what is beyond is still empty
            mask = torch.ones(new, tokens, dtype=torch.bool, device=keys[0].device).tril()[None, None]
        if mask is not None:
            mask = torch.cat([mask[..., :tokens]] * len(keys), dim=-1)
        return torch.cat(keys[::-1], dim=2), torch.cat(values[::-1], dim=2), mask

"""UniAttn: the layers of a superblock use the softmax map of its first layer, with a linear compensation (W_c).

    x'_n = x_n + A_l V_n W_o + Norm(x_n) W_c,  l = the source of n's superblock

Flows: queries and keys; with eager attention the softmax map itself, which other implementations never build. Reads:
every reader, its source's. Cache: keys of sources, values of all layers. Source: UniAttn (arXiv 2502.00439), Eq. 5 and
Table 12; as in its code, W_c reads the normalized input, or in Table 12's last row the output of W_v.

    x'_n = x_n + (A_l V_n + V_n W_c) W_o,  W_c (H_kv·D, H·D)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crosslayer.core.method import FROM_VALUES, TARGETS, Compensated
from crosslayer.core.options import group_sources, sharing_groups
from crosslayer.core.plan import DepthPlan

SIZE = 4  # layers of a superblock in the paper


@dataclass(frozen=True, kw_only=True)
class UniAttn(Compensated):
    """Superblocks share the softmax map of their first layer; every reader has a W_c."""

    saves, targets = ("keys",), (*TARGETS, FROM_VALUES)

    superblocks: tuple[tuple[int, ...], ...] = ()
    """Groups of 0-based layers in rising order, consecutive in the paper; other layers share nothing."""
    compensation: str | None = "attention"
    """What W_c adds to: "attention" (after W_o), "heads" (before W_o), "mlp" (the MLP's update), "heads-from-values"
    (before W_o, of the output of W_v), None: no W_c."""

    def plan(self, layers: int) -> DepthPlan:
        """Let the layers of a superblock read its first layer's queries and keys."""
        shared, own = group_sources("uniattn", "superblocks", self.superblocks, layers), tuple(range(layers))
        return DepthPlan(shared, shared, own, own)

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Make each group a superblock."""
        return cls(superblocks=sharing_groups("uniattn", groups), compensation=None)

    @classmethod
    def example(cls, layers: int) -> Self:
        """Make superblocks of four layers, as in the paper, from the last layer down within the upper half."""
        size = max(2, min(SIZE, layers - layers // 2))
        first = range(layers - size, layers // 2 - 1, -size)
        blocks = [tuple(range(layer, layer + size)) for layer in first] or [(layers - 2, layers - 1)]
        return cls(superblocks=tuple(reversed(blocks)))

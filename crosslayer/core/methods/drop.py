"""Dropping sublayers: attention, MLPs or whole layers are removed.

    x' = x  (no attention);  y = x'  (no MLP);  x' = x + Norm(x) W_c  (no attention, compensated)

Flows: nothing. Reads: nothing. Cache: nothing for layers without attention.
Source: LLMDrop (He et al. 2024, arXiv 2406.15786); whole layers as in ShortGPT; a linear map instead of attention as
in NBL (arXiv 2505.21077), whose map has a bias and reads x without the norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crosslayer.core.method import Compensated
from crosslayer.core.options import check_layers
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class Drop(Compensated):
    """The named layers have no attention, no MLP or neither.

    With `compensation` "attention" a linear compensation (W_c) on the normed input replaces attention in the layers of
    `attention`, as in NBL.
    """

    targets = ("attention",)
    saves = ("keys", "values")
    grouped = False
    parts = ("attention", "mlp", "layer")

    attention: tuple[int, ...] = ()
    """0-based layers whose attention is dropped."""
    mlp: tuple[int, ...] = ()
    """0-based layers whose MLP is dropped."""
    layers: tuple[int, ...] = ()
    """0-based layers that are dropped as a whole."""

    def plan(self, layers: int) -> DepthPlan:
        """Return a plan with None for each dropped sublayer."""
        if self.compensation is not None and not set(self.attention) - set(self.layers):
            raise ValueError("drop: compensation needs at least one layer in attention that is not in layers")
        for option, named in (("attention", self.attention), ("mlp", self.mlp), ("layers", self.layers)):
            check_layers("drop", option, named, layers)
        without_attention, without_mlp = {*self.attention, *self.layers}, {*self.mlp, *self.layers}
        source = tuple(None if layer in without_attention else layer for layer in range(layers))
        mlps = tuple(None if layer in without_mlp else layer for layer in range(layers))
        return DepthPlan(source, source, source, mlps)

    def compensates(self, plan: DepthPlan, layer: int) -> bool:
        """Return whether W_c replaces the layer's attention: not in layers that are dropped as a whole."""
        return layer in self.attention and layer not in self.layers

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int, part: str = "attention") -> Self:
        """Drop `part` of every layer in the groups."""
        named = tuple(layer for group in groups for layer in group)
        if part == "attention":
            return cls(attention=named)
        return cls(mlp=named) if part == "mlp" else cls(layers=named)

    @classmethod
    def example(cls, layers: int) -> Self:
        """Drop attention in every second layer of the upper half."""
        return cls(attention=tuple(range(layers // 2 + 1, layers, 2)))

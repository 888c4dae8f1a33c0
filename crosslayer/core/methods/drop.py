"""Dropping sublayers: attention, MLPs or whole layers do not exist.

    x' = x  (no attention);  y = x'  (no MLP);  x' = x + Norm(x) W_c [+ b]  (no attention, compensated)

Flows: nothing. Reads: nothing. Cache: nothing of a layer without attention.
Source: LLMDrop (He et al. 2024, arXiv 2406.15786); whole layers as in ShortGPT; a linear map with bias in the place of
attention as in NBL (arXiv 2505.21077), whose map reads x instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crosslayer.core.method import Compensated
from crosslayer.core.options import check_layers
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class Drop(Compensated):
    """Named layers lose their attention, their MLP or both; each stands by itself, so there are no groups.

    A W_c ("attention") with the norm before it takes the place of the layers in `attention`: NBL, or LLMDrop extended.
    """

    targets = ("attention",)
    saves = ("keys", "values")
    grouped = False
    parts = ("attention", "mlp", "layer")

    attention: tuple[int, ...] = ()
    """0-based layers that lose their attention."""
    mlp: tuple[int, ...] = ()
    """0-based layers that lose their MLP."""
    layers: tuple[int, ...] = ()
    """0-based layers that lose both."""

    def plan(self, layers: int) -> DepthPlan:
        """Write None where a sublayer goes."""
        if self.compensation is not None and not set(self.attention) - set(self.layers):
            raise ValueError("drop: compensation makes up for dropped attention, and no layer loses attention alone")
        for option, named in (("attention", self.attention), ("mlp", self.mlp), ("layers", self.layers)):
            check_layers("drop", option, named, layers)
        without_attention, without_mlp = {*self.attention, *self.layers}, {*self.mlp, *self.layers}
        source = tuple(None if layer in without_attention else layer for layer in range(layers))
        mlps = tuple(None if layer in without_mlp else layer for layer in range(layers))
        return DepthPlan(source, source, source, mlps)

    def compensates(self, plan: DepthPlan, layer: int) -> bool:
        """Answer with the layers that keep their MLP: W_c stands in the place of attention."""
        return layer in self.attention and layer not in self.layers

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int, part: str = "attention") -> Self:
        """Take a part away from every layer of the groups."""
        named = tuple(layer for group in groups for layer in group)
        if part == "attention":
            return cls(attention=named)
        return cls(mlp=named) if part == "mlp" else cls(layers=named)

    @classmethod
    def example(cls, layers: int) -> Self:
        """Take attention away from every second layer of the top half."""
        return cls(attention=tuple(range(layers // 2 + 1, layers, 2)))

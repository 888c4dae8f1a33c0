"""Dropping sublayers: attention, MLPs or whole layers do not exist.

    x' = x  (no attention);  y = x'  (no MLP)

Flows: nothing. Reads: nothing. Cache: nothing of a layer without attention.
Source: LLMDrop (He et al. 2024, arXiv 2406.15786); whole layers as in ShortGPT.
"""

from dataclasses import dataclass

from crosslayer.method import Method, check_layers
from crosslayer.plan import DepthPlan


@dataclass(frozen=True)
class Drop(Method):
    """Lists of 0-based layers: `attention` loses its attention, `mlp` its MLP, `layers` both."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()

    def plan(self, layers: int) -> DepthPlan:
        """Write None where a sublayer goes."""
        for option in ("attention", "mlp", "layers"):
            check_layers("drop", option, getattr(self, option), layers)
        gone, mlps = {*self.attention, *self.layers}, {*self.mlp, *self.layers}
        source = tuple(None if i in gone else i for i in range(layers))
        return DepthPlan(source, source, source, tuple(None if i in mlps else i for i in range(layers)))


if __name__ == "__main__":
    from crosslayer.decoder.show import show

    show(__spec__.name)

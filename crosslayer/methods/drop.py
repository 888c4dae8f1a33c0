"""Dropping sublayers: attention, MLPs or whole layers do not exist.

    x' = x  (no attention);  y = x'  (no MLP);  x' = x + Norm(x) W_c  (no attention, compensated)

Flows: nothing. Reads: nothing. Cache: nothing of a layer without attention.
Source: LLMDrop (He et al. 2024, arXiv 2406.15786); whole layers as in ShortGPT.
"""

from dataclasses import dataclass

from crosslayer.method import Method, check_choice, check_layers
from crosslayer.plan import DepthPlan


@dataclass(frozen=True)
class Drop(Method):
    """Lists of 0-based layers: `attention` loses its attention, `mlp` its MLP, `layers` both.

    `compensation` = "attention" keeps the norm of each layer in `attention` and adds a W_c there: an extension that the
    paper does not have.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    compensation: str | None = None

    def plan(self, layers: int) -> DepthPlan:
        """Write None where a sublayer goes."""
        check_choice("drop", "compensation", self.compensation, ("attention", None))
        if self.compensation is not None and not set(self.attention) - set(self.layers):
            raise ValueError("drop: compensation makes up for dropped attention, and no layer loses attention alone")
        for option in ("attention", "mlp", "layers"):
            check_layers("drop", option, getattr(self, option), layers)
        gone, mlps = {*self.attention, *self.layers}, {*self.mlp, *self.layers}
        source = tuple(None if i in gone else i for i in range(layers))
        return DepthPlan(source, source, source, tuple(None if i in mlps else i for i in range(layers)))

    def compensate(self, layers: int, layer: int) -> str | None:
        """Give layers that keep their MLP a W_c in the place of attention."""
        return self.compensation if layer in self.attention and layer not in self.layers else None


if __name__ == "__main__":
    from crosslayer.show import show

    show(__name__)

"""YOCO, "you only cache once": the lower half sees a window, the upper half reads a single layer's keys and values.

    U_n = softmax(Q_n K_n^T / √d) V_n over the last `window` tokens,  n ≤ L/2
    U_n = softmax(Q_n K_m^T / √d) V_m,  n > L/2,  m the first layer of the upper half

The keys and values of the upper half are made of what the lower half has put out.

Flows: keys and values. Reads: every layer of the upper half, those of its first. Cache: a layer in full, and of the
layers of the lower half the window. Source: YOCO (arXiv 2405.05254), with sliding-window attention below.
"""

from dataclasses import dataclass

from crosslayer.core.method import Method
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class YOCO(Method):
    """The layers of the upper half share keys and values; it sets layer_types and sliding_window by itself."""

    window: int = 1024
    """How many tokens each layer of the lower half sees, the token itself among them."""

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"yoco: window is {self.window}; it must be at least 1 token")

    def plan(self, layers: int) -> DepthPlan:
        """Let the upper half read its first layer."""
        middle, own = _middle(layers), tuple(range(layers))
        source = own[:middle] + (middle,) * (layers - middle)
        return DepthPlan(own, source, source, own)

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """Give the lower half its window."""
        middle = _middle(layers)
        return (self.window,) * middle + (None,) * (layers - middle)


def _middle(layers: int) -> int:
    if layers < 3:
        raise ValueError(f"yoco: with {layers} layers the upper half has nothing to share; it needs at least 3")
    return layers // 2

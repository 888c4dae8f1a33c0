"""YOCO, "you only cache once": the upper half reads one layer's keys and values, the lower half attends to a window.

    U_n = softmax(Q_n K_n^T / √d) V_n over the last `window` tokens,  n ≤ L/2
    U_n = softmax(Q_n K_m^T / √d) V_m,  n > L/2,  m the first layer of the upper half

The keys and values of the upper half are computed from the output of the lower half.

Flows: keys and values. Reads: every layer of the upper half, those of its first layer. Cache: all tokens of one layer,
the window in layers of the lower half. Source: YOCO (arXiv 2405.05254), with sliding windows in the lower half.
"""

from dataclasses import dataclass

from crosslayer.core.method import Method
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class YOCO(Method):
    """The layers of the upper half share keys and values; it sets the config's layer_types and sliding_window."""

    window: int = 1024
    """How many tokens each layer of the lower half attends to, including the token itself."""

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"yoco: window must be at least 1 token, got {self.window}")

    def plan(self, layers: int) -> DepthPlan:
        """Let the upper half read the keys and values of its first layer."""
        middle, own = self.windows(layers).index(None), tuple(range(layers))
        source = own[:middle] + (middle,) * (layers - middle)
        return DepthPlan(own, source, source, own)

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """Return the window for the lower half, None for the upper."""
        if layers < 3:
            raise ValueError(f"yoco needs at least 3 layers, got {layers}")
        middle = layers // 2
        return (self.window,) * middle + (None,) * (layers - middle)

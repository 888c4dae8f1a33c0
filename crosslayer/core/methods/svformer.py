"""SVFormer: all layers use the values of the first layer, or of the nearest earlier anchor layer.

    U_n = A_n V_1

An anchor is a source: a layer whose values the layers above it read, up to the next anchor.

Flows: values (or queries, keys). Reads: every layer, its anchor's. Cache: keys of all layers, values of anchors.
Source: ResFormer (arXiv 2410.17897), Eq. 10; anchors Fig. 17, other states Fig. 16, `every` Fig. 5.
"""

from dataclasses import dataclass

from crosslayer.core.method import Method
from crosslayer.core.options import check_choice, check_layers
from crosslayer.core.plan import STATES, DepthPlan


@dataclass(frozen=True)
class SVFormer(Method):
    """Layers read the values of the nearest earlier anchor."""

    anchors: tuple[int, ...] = (0,)
    """0-based layers that compute the shared state; must include layer 0."""
    share: tuple[str, ...] | str = "values"
    """The shared state: "queries", "keys" or "values", or several of them."""
    every: int | None = None
    """Make every n-th layer an anchor too; None: only `anchors`."""

    def plan(self, layers: int) -> DepthPlan:
        """Let each layer read the shared states of its nearest earlier anchor."""
        check_layers("svformer", "anchors", self.anchors, layers)
        if self.every is not None and not 1 <= self.every <= layers:
            raise ValueError(f"svformer: every must be 1 to {layers} (the number of layers), got {self.every}")
        anchors = set(self.anchors) | (set(range(0, layers, self.every)) if self.every else set())
        if 0 not in anchors:
            raise ValueError(f"svformer: anchors must include layer 0, got {sorted(anchors)}")
        shared = (self.share,) if isinstance(self.share, str) else self.share
        for state in shared:
            check_choice("svformer", "share", state, STATES)
        own, latest = tuple(range(layers)), list(range(layers))
        for layer in own:
            if layer not in anchors:
                latest[layer] = latest[layer - 1]
        source = tuple(latest)
        queries, keys, values = (source if state in shared else own for state in STATES)
        return DepthPlan(queries, keys, values, own)

"""SVFormer: all layers use the values of the first layer, or of the latest anchor below them.

    U_n = A_n V_1

Flows: values (or queries, keys). Reads: every layer, its anchor's. Cache: keys of all layers, values of the anchors.
Source: ResFormer (arXiv 2410.17897), Eq. 10; anchors Fig. 17, other states Fig. 16, `every` Fig. 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crosslayer.core.method import Compensated
from crosslayer.core.options import check_choice, check_layers, sharing_groups
from crosslayer.core.plan import STATES, DepthPlan


@dataclass(frozen=True)
class SVFormer(Compensated):
    """Anchors own what is shared, the layers above borrow it; the search leaves the method out (`saves` is empty)."""

    anchors: tuple[int, ...] = (0,)
    """0-based layers that own what is shared; layer 0 must be there."""
    share: tuple[str, ...] | str = "values"
    """The state that is shared, or several of "queries", "keys" and "values"."""
    every: int | None = None
    """Make each n-th layer an anchor too."""

    def plan(self, layers: int) -> DepthPlan:
        """Let each layer borrow the shared states of its latest anchor."""
        check_layers("svformer", "anchors", self.anchors, layers)
        if self.every is not None and not 1 <= self.every <= layers:
            raise ValueError(f"svformer: every is {self.every}; it must be between 1 and the {layers} layers")
        anchors = set(self.anchors) | (set(range(0, layers, self.every)) if self.every else set())
        if 0 not in anchors:
            raise ValueError(
                f"svformer: anchors {sorted(anchors)} must hold layer 0, below which nothing can be shared"
            )
        shared = (self.share,) if isinstance(self.share, str) else self.share
        for state in shared:
            check_choice("svformer", "share", state, STATES)
        own, latest = tuple(range(layers)), list(range(layers))
        for layer in own:
            if layer not in anchors:
                latest[layer] = latest[layer - 1]
        borrowed = tuple(latest)
        return DepthPlan(**{state: borrowed if state in shared else own for state in STATES}, mlps=own)

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Make an anchor of every layer that is not a group's second or later layer."""
        for group in groups:
            if list(group) != list(range(group[0], group[0] + len(group))):
                raise ValueError(
                    f"svformer: groups holds {list(group)}; a layer borrows of the nearest anchor below it, so that "
                    "groups are runs of consecutive layers"
                )
        followers = {layer for group in sharing_groups("svformer", groups) for layer in group[1:]}
        anchors = tuple(layer for layer in range(layers) if layer not in followers)
        return cls(anchors)

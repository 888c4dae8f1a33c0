"""SVFormer: all layers use the values of the first layer, or of the latest anchor below them.

    U_n = A_n V_1

Flows: values (or queries, keys). Reads: every layer, its anchor's. Cache: keys of all layers, values of the anchors.
Source: ResFormer (arXiv 2410.17897), Eq. 10; anchors Fig. 17, other states Fig. 16, `every` Fig. 5.
"""

from dataclasses import dataclass

from crosslayer.method import TARGETS, Method, check_choice, check_layers
from crosslayer.plan import STATES, DepthPlan


@dataclass(frozen=True)
class SVFormer(Method):
    """`anchors` own what is shared; `share` names the states; with `every` = n each n-th layer is an anchor too.

    `compensation` is where a W_c of the other layers writes, as in UniAttn: an extension that the paper does not have.
    """

    anchors: tuple[int, ...] = (0,)
    share: tuple[str, ...] | str = "values"
    every: int | None = None
    compensation: str | None = None

    def plan(self, layers: int) -> DepthPlan:
        """Give each layer the shared states of its latest anchor."""
        check_choice("svformer", "compensation", self.compensation, (*TARGETS, None))
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
        own = tuple(range(layers))
        latest = tuple(max(a for a in anchors if a <= i) for i in own)
        return DepthPlan(**{state: latest if state in shared else own for state in STATES}, mlps=own)

    def compensate(self, layers: int, layer: int) -> str | None:
        """Give every layer that borrows a W_c."""
        plan = self.plan(layers)
        borrows = any(plan.sources(state)[layer] != layer for state in STATES)
        return self.compensation if borrows else None


if __name__ == "__main__":
    from crosslayer.show import show

    show(__name__)

"""UniAttn: in a superblock the first layer computes the softmax map, the others use it, and W_c makes up for it.

    x'_n = x_n + A_l V_n W_o + Norm(x_n) W_c,  l = the leader of n's superblock

Flows: queries and keys (so the map is shared without ever being built). Reads: every follower, the leader's.
Cache: keys of leaders, values of all. Source: UniAttn (arXiv 2502.00439), Eq. 5 and Table 12; as in its code, W_c reads
the normalised input.
"""

from dataclasses import dataclass

from crosslayer.method import TARGETS, Method, check_choice, leaders
from crosslayer.plan import DepthPlan


@dataclass(frozen=True)
class UniAttn(Method):
    """`superblocks` are lists of consecutive 0-based layers; `compensation` is where W_c writes (None: no W_c).

    "attention": after W_o; "heads": before W_o; "mlp": on the MLP's update.
    """

    superblocks: tuple[tuple[int, ...], ...] = ()
    compensation: str | None = "attention"

    def plan(self, layers: int) -> DepthPlan:
        """Give followers the leader's queries and keys."""
        check_choice("uniattn", "compensation", self.compensation, (*TARGETS, None))
        shared, own = leaders("uniattn", "superblocks", self.superblocks, layers), tuple(range(layers))
        return DepthPlan(shared, shared, own, own)

    def compensate(self, layers: int, layer: int) -> str | None:
        """Give every follower a W_c."""
        return self.compensation if self.plan(layers).keys[layer] != layer else None


if __name__ == "__main__":
    from crosslayer.show import show

    show(__name__)

"""UniAttn: in a superblock the first layer computes the softmax map, the others use it, and W_c makes up for it.

    x'_n = x_n + A_l V_n W_o + Norm(x_n) W_c,  l = the leader of n's superblock

Flows: queries and keys (so the map is shared without ever being built). Reads: every follower, the leader's.
Cache: keys of leaders, values of all. Source: UniAttn (arXiv 2502.00439), Eq. 5 and Table 12; as in its code, W_c reads
the normalised input.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crosslayer.method import Compensation, Method, check_choice, check_layers
from crosslayer.plan import DepthPlan

if TYPE_CHECKING:
    from crosslayer.decoder.configuration import CrossLayerConfig

TARGETS = ("attention", "heads", "mlp", None)


@dataclass(frozen=True)
class UniAttn(Method):
    """`superblocks` are lists of consecutive 0-based layers; `compensation` is where W_c writes (None: no W_c).

    "attention": after W_o; "heads": before W_o; "mlp": on the MLP's update.
    """

    superblocks: tuple[tuple[int, ...], ...] = ()
    compensation: str | None = "attention"

    def plan(self, layers: int) -> DepthPlan:
        """Give followers the leader's queries and keys."""
        check_choice("uniattn", "compensation", self.compensation, TARGETS)
        check_layers("uniattn", "superblocks", [i for block in self.superblocks for i in block], layers)
        source = list(range(layers))
        for block in self.superblocks:
            if not block or list(block) != list(range(block[0], block[0] + len(block))):
                raise ValueError(f"uniattn: superblock {list(block)} is not a run of consecutive layers")
            for layer in block:
                source[layer] = block[0]
        own, shared = tuple(range(layers)), tuple(source)
        return DepthPlan(shared, shared, own, own)

    def compensate(self, config: "CrossLayerConfig", layer: int) -> Compensation | None:
        """Give every follower a W_c."""
        follower = any(layer in block[1:] for block in self.superblocks)
        if not follower or self.compensation is None:
            return None
        assert config.head_dim is not None
        width = config.num_attention_heads * config.head_dim if self.compensation == "heads" else config.hidden_size
        return Compensation(config.hidden_size, width, self.compensation)


if __name__ == "__main__":
    from crosslayer.decoder.show import show

    show(__spec__.name)

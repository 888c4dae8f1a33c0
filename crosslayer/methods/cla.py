"""Cross-layer attention (CLA): groups of consecutive layers use the keys and values of the group's first layer.

    U_n = softmax(Q_n K_l^T / √d) V_l,  l = the leader of n's group

Flows: keys and values. Reads: every follower, the leader's. Cache: one layer in each group.
Source: Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention".
"""

from dataclasses import dataclass

from crosslayer.method import Method
from crosslayer.plan import DepthPlan


@dataclass(frozen=True)
class CLA(Method):
    """Groups of `group` layers from `start` up to `end` (exclusive, None: all); a remainder is a shorter group."""

    group: int = 2
    start: int = 0
    end: int | None = None

    def plan(self, layers: int) -> DepthPlan:
        """Give followers the leader's keys and values."""
        end = layers if self.end is None else self.end
        if not 0 <= self.start < end <= layers:
            raise ValueError(f"cla: start {self.start} and end {end} must satisfy 0 ≤ start < end ≤ {layers} layers")
        if not 1 <= self.group <= layers:
            raise ValueError(f"cla: group is {self.group}; it must be between 1 and the {layers} layers")
        own = tuple(range(layers))
        source = tuple(i - (i - self.start) % self.group if self.start <= i < end else i for i in own)
        return DepthPlan(own, source, source, own)


if __name__ == "__main__":
    from crosslayer.decoder.show import show

    show(__spec__.name)

"""Cross-layer attention (CLA): groups of consecutive layers use the keys and values of the group's first layer.

    U_n = softmax(Q_n K_l^T / √d) V_l,  l = the leader of n's group

Flows: keys and values. Reads: every follower, the leader's. Cache: one layer in each group.
Source: Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention".
"""

from dataclasses import dataclass

from crosslayer.method import TARGETS, Method, check_choice, leaders
from crosslayer.plan import DepthPlan


@dataclass(frozen=True)
class CLA(Method):
    """Groups of `group` layers from `start` up to `end` (exclusive, None: all); a remainder is a shorter group.

    `groups` names them one by one instead, as lists of consecutive 0-based layers. `compensation` is where a W_c of the
    followers writes, as in UniAttn: an extension that the paper does not have.
    """

    group: int = 2
    start: int = 0
    end: int | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    compensation: str | None = None

    def plan(self, layers: int) -> DepthPlan:
        """Give followers the leader's keys and values."""
        check_choice("cla", "compensation", self.compensation, (*TARGETS, None))
        own, source = tuple(range(layers)), leaders("cla", "groups", self._groups(layers), layers)
        return DepthPlan(own, source, source, own)

    def compensate(self, layers: int, layer: int) -> str | None:
        """Give every follower a W_c."""
        return self.compensation if self.plan(layers).keys[layer] != layer else None

    def _groups(self, layers: int) -> tuple[tuple[int, ...], ...]:
        if self.groups is not None:
            if (self.group, self.start, self.end) != (2, 0, None):
                raise ValueError("cla: groups names the groups itself; leave group, start and end out")
            return self.groups
        end = layers if self.end is None else self.end
        if not 0 <= self.start < end <= layers:
            raise ValueError(f"cla: start {self.start} and end {end} must satisfy 0 ≤ start < end ≤ {layers} layers")
        if not 1 <= self.group <= layers:
            raise ValueError(f"cla: group is {self.group}; it must be between 1 and the {layers} layers")
        return tuple(tuple(range(i, min(i + self.group, end))) for i in range(self.start, end, self.group))


if __name__ == "__main__":
    from crosslayer.show import show

    show(__name__)

"""Cross-layer attention (CLA): groups of consecutive layers use the keys and values of the group's first layer.

    U_n = softmax(Q_n K_l^T / √d) V_l,  l = the source of n's group

Flows: keys and values. Reads: every reader, its source's. Cache: keys and values of sources.
Source: Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crosslayer.core.method import Compensated
from crosslayer.core.options import group_sources, sharing_groups
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class CLA(Compensated):
    """Groups of `group` consecutive layers from `start` to `end` (the last may be shorter), or the given `groups`."""

    saves = ("keys", "values")

    group: int = 2
    """Layers per group."""
    start: int = 0
    """The first layer of the first group."""
    end: int | None = None
    """The layer after the last group; None: groups extend to the last layer."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """Explicit groups of 0-based layers in rising order, instead of `group`, `start` and `end`."""

    def plan(self, layers: int) -> DepthPlan:
        """Let the layers of a group read its first layer's keys and values."""
        groups = self.groups
        if groups is None:
            end = layers if self.end is None else self.end
            if not 0 <= self.start < end <= layers:
                raise ValueError(f"cla: start and end must be 0 ≤ start < end ≤ {layers}, got {self.start} and {end}")
            if not 1 <= self.group <= layers:
                raise ValueError(f"cla: group must be 1 to {layers} (the number of layers), got {self.group}")
            firsts = range(self.start, end, self.group)
            groups = tuple(tuple(range(first, min(first + self.group, end))) for first in firsts)
        elif (self.group, self.start, self.end) != (2, 0, None):
            raise ValueError("cla: groups cannot be combined with group, start and end; leave these out")
        own, source = tuple(range(layers)), group_sources("cla", "groups", groups, layers)
        return DepthPlan(own, source, source, own)

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Return CLA with these groups."""
        return cls(groups=sharing_groups("cla", groups))

"""KVSharer: layers use the keys and values of any earlier layer, usually one with a dissimilar cache.

    U_n = softmax(Q_n K_m^T / √d) V_m,  (n, m) a pair, m < n

Flows: keys and values. Reads: the upper layer of each pair, the lower one's. Cache: all layers but readers.
Source: KVSharer (arXiv 2410.18517), which pairs the layers whose caches differ most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crosslayer.core.method import Compensated
from crosslayer.core.options import check_layers, sharing_groups
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class KVSharer(Compensated):
    """Pairs of a reader and its source; several readers may have the same source."""

    pairs: tuple[tuple[int, int], ...] = ()
    """0-based pairs (reader, source): the reader uses the keys and values of the earlier source."""

    def plan(self, layers: int) -> DepthPlan:
        """Let the reader of each pair use its source's keys and values."""
        if not self.pairs:
            raise ValueError(
                "kvsharer: pairs must not be empty; write pairs of reader and source, for example ((20, 3),)"
            )
        check_layers("kvsharer", "pairs (as readers)", [reader for reader, _ in self.pairs], layers)
        own, sources = tuple(range(layers)), list(range(layers))
        for reader, source in self.pairs:
            check_layers("kvsharer", "pairs", [source], layers)
            if source >= reader:
                raise ValueError(f"kvsharer: each pair must be a reader and an earlier source, got {reader, source}")
            sources[reader] = source
        for reader, source in self.pairs:
            if sources[source] != source:
                raise ValueError(
                    f"kvsharer: layer {reader} reads layer {source}, which itself reads layer {sources[source]}; use "
                    f"the pair {reader, sources[source]}"
                )
        return DepthPlan(own, tuple(sources), tuple(sources), own)

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Let all layers of a group read its first layer."""
        pairs = [(reader, group[0]) for group in sharing_groups("kvsharer", groups) for reader in group[1:]]
        return cls(tuple(sorted(pairs)))

    @classmethod
    def example(cls, layers: int) -> Self:
        """Let every second layer of the upper half read the layer half the depth below it."""
        half = (layers + 1) // 2
        return cls(tuple((layer, layer - half) for layer in range(half, layers, 2)))

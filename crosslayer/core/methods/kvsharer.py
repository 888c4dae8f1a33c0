"""KVSharer: layers use the keys and values of any other layer below them, as a rule of a most dissimilar one.

    U_n = softmax(Q_n K_m^T / √d) V_m,  (n, m) a pair, m < n

Flows: keys and values. Reads: the upper layer of a pair, the lower one's. Cache: all layers but readers.
Source: KVSharer (arXiv 2410.18517), which picks the pairs whose caches differ most: `--select distance` of a retrofit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crosslayer.core.method import Compensated
from crosslayer.core.options import check_layers, sharing_groups
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class KVSharer(Compensated):
    """Pairs of a reading and a lending layer; several may read the same."""

    consecutive = False

    pairs: tuple[tuple[int, int], ...] = ()
    """0-based layers that read, each with the layer below it whose keys and values it reads."""

    def plan(self, layers: int) -> DepthPlan:
        """Let the upper layer of each pair borrow the lower one's keys and values."""
        if not self.pairs:
            raise ValueError("kvsharer: there are no pairs; name the reading and the lending layer of each: ((20, 3),)")
        check_layers("kvsharer", "pairs (as readers)", [reader for reader, _ in self.pairs], layers)
        own, source = tuple(range(layers)), list(range(layers))
        for reader, source_layer in self.pairs:
            check_layers("kvsharer", "pairs", [source_layer], layers)
            if source_layer >= reader:
                raise ValueError(
                    f"kvsharer: pair {reader, source_layer} must name the reading layer, then one below it"
                )
            source[reader] = source_layer
        for reader, source_layer in self.pairs:
            if source[source_layer] != source_layer:
                raise ValueError(
                    f"kvsharer: layer {reader} reads layer {source_layer}, which reads layer {source[source_layer]} itself; pair "
                    f"{reader} with {source[source_layer]}"
                )
        return DepthPlan(own, tuple(source), tuple(source), own)

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Let the first layer of each group lend to all others."""
        pairs = [(reader, group[0]) for group in sharing_groups("kvsharer", groups) for reader in group[1:]]
        return cls(tuple(sorted(pairs)))

    @classmethod
    def example(cls, layers: int) -> Self:
        """Let every second layer of the top half read the layer half of the depth below it."""
        half = (layers + 1) // 2
        return cls(tuple((layer, layer - half) for layer in range(half, layers, 2)))

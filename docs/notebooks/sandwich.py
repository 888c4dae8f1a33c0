"""Sandwich: the middle layers use the keys and values of the last layer below them.

    U_n = softmax(Q_n K_m^T / √d) V_m,  n in the middle, m the last layer below it

Flows: keys and values. Reads: every middle layer, those of one layer. Cache: `below` + `above` layers.
Source: "sandwich-bottom" of Wu, Wu and Tu 2024 (arXiv 2410.14442).
"""

from dataclasses import dataclass

from crosslayer.core.method import Compensated
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class Sandwich(Compensated):
    """The middle layers share the keys and values of one layer."""

    below: int = 2
    """Number of layers below the middle, with keys and values of their own; the last is the source of the middle."""
    above: int = 1
    """Number of layers above the middle, with keys and values of their own."""

    def plan(self, layers):
        """Let the middle read the layer below it."""
        if self.below < 1 or self.above < 0 or self.below + self.above >= layers:
            raise ValueError(f"sandwich: below {self.below} and above {self.above} leave no middle layer of {layers}")
        own = tuple(range(layers))
        source = tuple(self.below - 1 if self.below <= layer < layers - self.above else layer for layer in own)
        return DepthPlan(queries=own, keys=source, values=source, mlps=own)

    @classmethod
    def example(cls, layers):
        """Return half of the layers below, and one above."""
        return cls(layers // 2, 1)

"""NeuTRENO: the output of attention is pulled from the layer's own values towards those of the first layer.

    U_n = A_n V_n + λ (V_1 − V_n),  n ≥ 2

V_n is what the methods before it in the list have made of the values: after `resformer` the mixed ones, before it the
raw ones.

Flows: the values of the new tokens of the first layer. Reads: every layer that owns values, but the first. Cache:
unchanged. Source: NeuTRENO (Nguyen et al. 2023, arXiv 2312.00751), as in ResFormer (arXiv 2410.17897), Eq. 8.
"""

import math
from dataclasses import dataclass

from crosslayer.core.method import Carry, Config, HeadMixer, Method, Mixed, State, ValueAdder, Wiring
from crosslayer.core.options import mixed_layers

FIRST = "neutreno.first"


@dataclass(frozen=True)
class NeuTRENO(Method):
    """The difference to the first layer's values is added to the output of attention, token by token."""

    weight: float = 0.4
    """λ: how much of the difference is added; the paper has 0.4 for language, 0.6 for vision; 0 is the base."""

    def __post_init__(self):
        if not math.isfinite(self.weight):
            raise ValueError(f"neutreno: weight is {self.weight}; it must be a finite number, such as 0.4")

    def heads(self, config: Config, wiring: Wiring, layer: int) -> HeadMixer | None:
        """Add in every layer that owns values, but the first of them."""
        own_layers = mixed_layers("neutreno", wiring.plan, "values")
        return _Difference(self.weight, first=layer == own_layers[0]) if layer in own_layers else None


class _Difference(ValueAdder):
    """Adds λ (V_1 − V_n); in the first layer it hands V_1 upward instead."""

    def __init__(self, weight: float, first: bool):
        super().__init__("neutreno")
        self.weight, self.first = weight, first

    def before(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        assert v is not None
        if self.first:
            return q, k, v, {**carry, FIRST: v}
        return q, k, v, {**carry, self.added: self.weight * (carry[FIRST] - v)}

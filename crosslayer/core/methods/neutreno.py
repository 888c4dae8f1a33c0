"""NeuTRENO: the output of attention is pulled from the layer's own values towards those of the first layer.

    U_n = A_n V_n + λ (V_1 − V_n),  n ≥ 2

V_n are the values after the methods before it in the list: after `resformer` the mixed ones, before it the raw ones.

Flows: the first layer's values of the new tokens. Reads: every layer with values of its own but the first. Cache:
unchanged. Source: NeuTRENO (Nguyen et al. 2023, arXiv 2312.00751), as in ResFormer (arXiv 2410.17897), Eq. 8.
"""

import math
from dataclasses import dataclass

from crosslayer.core.method import Carry, Config, HeadMixer, Method, Mixed, State, ValueAdder, Wiring
from crosslayer.core.options import mixed_layers

FIRST = "neutreno.first"


@dataclass(frozen=True)
class NeuTRENO(Method):
    """The difference from the first layer's values is added to the output of attention, token by token."""

    weight: float = 0.4
    """λ: the weight of the difference; the paper uses 0.4 for language and 0.6 for vision; 0 adds nothing."""

    def __post_init__(self):
        if not math.isfinite(self.weight):
            raise ValueError(f"neutreno: weight must be a finite number such as 0.4, got {self.weight}")

    def heads(self, config: Config, wiring: Wiring, layer: int) -> HeadMixer | None:
        """Add in every layer with values of its own but the first."""
        own_layers = mixed_layers("neutreno", wiring.plan, "values")
        return _Difference(self.weight, first=layer == own_layers[0]) if layer in own_layers else None


class _Difference(ValueAdder):
    """Adds λ (V_1 − V_n); in the first layer it puts V_1 into the carry instead."""

    def __init__(self, weight: float, first: bool):
        super().__init__("neutreno")
        self.weight, self.first = weight, first

    def before(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        assert v is not None
        if self.first:
            return q, k, v, {**carry, FIRST: v}
        return q, k, v, {**carry, self.added: self.weight * (carry[FIRST] - v)}

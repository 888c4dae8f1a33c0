"""Identity mapping of values: the mean of all earlier layers' values is added to the output of attention.

    U_n = A_n V_n + 1/(n − 1) Σ_{i<n} V_i,  n ≥ 2

The added values are those of the token itself: unlike with ResFormer's `all`, the attention map does not mix them over
tokens.

Flows: the sum of the values of the new tokens. Reads: every layer with values of its own but the first. Cache:
unchanged.
Source: ResFormer (arXiv 2410.17897), Eq. 6.
"""

from dataclasses import dataclass

from crosslayer.core.method import Carry, Config, HeadMixer, Method, Mixed, State, ValueAdder, Wiring
from crosslayer.core.options import mixed_layers
from crosslayer.core.sources import outside_layer_graphs

SUM = "identity_mapping.sum"


@dataclass(frozen=True)
class IdentityMapping(Method):
    """The mean of earlier layers' values is added to the output of attention, token by token."""

    def heads(self, config: Config, wiring: Wiring, layer: int) -> HeadMixer | None:
        """Add in every layer with values of its own but the first."""
        own_layers = mixed_layers("identity_mapping", wiring.plan, "values")
        return _Mean(below=own_layers.index(layer)) if layer in own_layers else None


class _Mean(ValueAdder):
    """Adds the mean of the values of `below` earlier layers; passes on their sum with the layer's own."""

    def __init__(self, below: int):
        super().__init__("identity_mapping")
        self.below = below

    # `below` differs by layer: inside a layer's graph it would be a constant, and every layer would compile again
    @outside_layer_graphs
    def before(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        """Put the mean of earlier values into the carry, and add the layer's own (B, H_kv, T, D) to their sum."""
        assert v is not None
        if self.below == 0:
            return q, k, v, {**carry, SUM: v}
        return q, k, v, {**carry, SUM: carry[SUM] + v, self.added: carry[SUM] / self.below}

"""Identity mapping of values: what the layers below have as values is added to the output of attention, unweighted.

    U_n = A_n V_n + 1/(n − 1) Σ_{i<n} V_i,  n ≥ 2

It stands between the dense sum of all earlier values under the layer's own map and plain attention: no token but the
token itself contributes what is added.

Flows: the sum of the values of the new tokens. Reads: every layer that owns values, but the first. Cache: unchanged.
Source: ResFormer (arXiv 2410.17897), Eq. 6.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from crosslayer.core.method import Carry, HeadMixer, Method, Wiring, add_values

if TYPE_CHECKING:
    from transformers import LlamaConfig

SUM, ADDED = "identity_mapping.sum", "identity_mapping.added"


@dataclass(frozen=True)
class IdentityMapping(Method):
    """The mean of the values below is added to the output of attention, token by token."""

    def heads(self, config: "LlamaConfig", wiring: Wiring, layer: int) -> HeadMixer | None:
        """Add in every layer that owns values and has others below it."""
        owners = [i for i in range(wiring.plan.layers) if wiring.plan.owns("values", i)]
        if len(owners) < 2:
            raise ValueError(
                f"identity_mapping: only layer {owners[0]} owns values here, so nothing would be added; it needs two "
                "layers that own values"
            )
        return _Mean(below=owners.index(layer)) if layer in owners else None


class _Mean(HeadMixer):
    """Adds the mean of the values of `below` layers; hands their sum upward, with the layer's own."""

    def __init__(self, below: int):
        super().__init__()
        self.below = below

    def before(
        self, q: Tensor | None, k: Tensor | None, v: Tensor | None, carry: Carry
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Carry]:
        """Keep the mean of the values below for `after`, and add the own (B, H_kv, T, D) to their sum."""
        assert v is not None
        if self.below == 0:
            return q, k, v, {**carry, SUM: v}
        return q, k, v, {**carry, SUM: carry[SUM] + v, ADDED: carry[SUM] / self.below}

    def after(self, out: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the output with the mean."""
        if self.below == 0:
            return out, carry
        out = add_values(out, carry[ADDED])
        return out, {name: value for name, value in carry.items() if name != ADDED}

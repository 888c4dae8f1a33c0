"""Linear attention instead of softmax attention: transformers' block of Kimi Linear.

    S_t = (I − β_t k_t k_tᵀ) Diag(a_t) S_{t−1} + β_t k_t v_tᵀ,  u_t = S_tᵀ q_t

The state S has a fixed size for any length, and layers cannot share it.

Shapes: B batch, T new tokens, C hidden.
"""

import math
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import Cache
from transformers import initialization as init
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention, KimiLinearForgetGate

from crosslayer.core.decoder.packed import Documents, by_document
from crosslayer.core.method import Mixing

if TYPE_CHECKING:
    from crosslayer.core.decoder.configuration import CrossLayerConfig


class ForgetGate(KimiLinearForgetGate, Mixing):
    """Kimi Linear's decays."""

    def __init__(self, config: "CrossLayerConfig"):
        super().__init__(config)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Initialise the decays as Kimi Linear does, unless a checkpoint has filled them."""
        init.copy_(self.A_log, init.uniform_(self.A_log, a=1.0, b=16.0).log())
        init.uniform_(self.dt_bias, a=math.log(1e-3), b=math.log(1e-1))
        step = self.dt_bias.exp().clamp_min(1e-4)
        init.copy_(self.dt_bias, step + (-(-step).expm1()).log())  # so that softplus gives the step


class LinearAttention(KimiLinearDeltaAttention):
    """Kimi Linear's block with its weight names; it computes in float32 for any dtype."""

    def __init__(self, config: "CrossLayerConfig", layer_idx: int):
        super().__init__(config, layer_idx)  # type: ignore[arg-type]
        self.forget_gate = ForgetGate(config)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | Documents | None, cache: Cache | None
    ) -> Tensor:
        """Return the update (B, T, C); `attention_mask` (B, T) masks padding, or separates documents."""
        if isinstance(attention_mask, Documents):
            return by_document(super().forward, hidden_states, attention_mask)
        return super().forward(hidden_states, cache, attention_mask)

"""transformers' blocks instead of softmax attention or an MLP, loaded only if a config has them.

Linear attention of Kimi Linear, whose state S has a fixed size for any length, and cannot be shared by layers:

    S_t = (I − β_t k_t k_tᵀ) Diag(a_t) S_{t−1} + β_t k_t v_tᵀ,  u_t = S_tᵀ q_t

A mixture of experts of Mixtral:

    y = Σ_{e ∈ top k} softmax(x W_r)_e / Σ_{top k} · MLP_e(x)

Shapes: B batch, T new tokens, C hidden, E experts.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers import initialization as init
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention, KimiLinearForgetGate
from transformers.models.mixtral.modeling_mixtral import (
    MixtralExperts,
    MixtralSparseMoeBlock,
    MixtralTopKRouter,
    load_balancing_loss_func,
)

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.packed import Documents
from crosslayer.core.method import Mixing


class ForgetGate(KimiLinearForgetGate, Mixing):
    """Kimi Linear's decays."""

    def reset(self) -> None:
        """Initialise the decays as Kimi Linear does, unless a checkpoint has filled them."""
        init.copy_(self.A_log, init.uniform_(self.A_log, a=1.0, b=16.0).log())
        init.uniform_(self.dt_bias, a=math.log(1e-3), b=math.log(1e-1))
        # log-uniform steps, and the number whose softplus is the step
        step = self.dt_bias.exp().clamp_min(1e-4)
        init.copy_(self.dt_bias, step + (-(-step).expm1()).log())


class LinearAttention(KimiLinearDeltaAttention):
    """Kimi Linear's block with its weight names; it computes in float32 for any dtype."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        self.forget_gate = ForgetGate(config)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | Documents | None, cache: Cache | None
    ) -> Tensor:
        """Return the update (B, T, C); `attention_mask` (B, T) masks padding, or separates documents."""
        if isinstance(attention_mask, Documents):
            # the block has no way to reset its state within a row
            forward, pieces = super().forward, hidden_states.flatten(0, 1).split(attention_mask.lengths)
            return torch.cat([forward(piece[None]) for piece in pieces], 1).view_as(hidden_states)
        return super().forward(hidden_states, cache, attention_mask)


class _Normal(Mixing):
    """Weights with the normal initialization of other matrices."""

    std = 0.02

    def reset(self) -> None:
        for parameter in self.parameters():
            init.normal_(parameter, mean=0.0, std=self.std)


class Router(MixtralTopKRouter, _Normal):
    """Mixtral's router."""


class Experts(MixtralExperts, _Normal):  # type: ignore[misc]
    """Mixtral's experts."""


class SparseMLP(MixtralSparseMoeBlock):
    """Mixtral's block with its weight names, which also returns the router's logits."""

    def __init__(self, config: CrossLayerConfig):
        super().__init__(config)  # type: ignore[arg-type]
        self.gate, self.experts = Router(config), Experts(config)  # type: ignore[arg-type]
        self.gate.std = self.experts.std = config.initializer_range

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the update (B, T, C) and the router's logits (B·T, E)."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])  # (B·T, C)
        logits, weights, chosen = self.gate(rows)
        return self.experts(rows, chosen, weights).view_as(hidden_states), logits


def balance_loss(config: CrossLayerConfig, outputs: MoeModelOutputWithPast, mask: Any) -> Tensor:
    """Return Mixtral's loss for balanced use of experts (Switch Transformer, eq. 4-6) from the routers' logits.

    A `mask` (B, cached + T) of padding excludes it; other forms of masks do not.
    """
    assert outputs.last_hidden_state is not None
    tokens = outputs.last_hidden_state.shape[1]
    padding = mask[:, -tokens:] if isinstance(mask, Tensor) and mask.dim() == 2 else None  # (B, T)
    options = (config.num_local_experts, config.num_experts_per_tok, padding)
    loss = load_balancing_loss_func(outputs.router_logits, *options)  # type: ignore[arg-type]
    assert isinstance(loss, Tensor)
    return loss


def share_of_batch(labels: Tensor | None, options: dict[str, Any]) -> Any:
    """Return the share that some labels (B, T) have in those of all accumulated batches; 1 if there is one batch.

    Trainer adds up the losses of accumulated batches and divides none, because `num_items_in_batch` divides the
    tokens' losses. Without this share a router's loss would count once per batch.
    """
    whole = options.get("num_items_in_batch")
    if whole is None:
        return 1.0
    shifted = options.get("shift_labels")
    counted = labels[:, 1:] if shifted is None and labels is not None else shifted
    assert counted is not None  # the loss needs labels
    return counted.ne(options.get("ignore_index", -100)).sum() / whole

"""A mixture of experts instead of an MLP: transformers' sparse block of Mixtral.

    y = Σ_{e ∈ top k} softmax(x W_r)_e / Σ_{top k} · MLP_e(x)

Shapes: B batch, T new tokens, C hidden, E experts.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import initialization as init
from transformers.models.mixtral.modeling_mixtral import (
    MixtralExperts,
    MixtralSparseMoeBlock,
    MixtralTopKRouter,
    load_balancing_loss_func,
)

from crosslayer.core.method import Mixing

if TYPE_CHECKING:
    from crosslayer.core.decoder.configuration import CrossLayerConfig


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

    def __init__(self, config: "CrossLayerConfig"):
        super().__init__(config)  # type: ignore[arg-type]
        self.gate, self.experts = Router(config), Experts(config)  # type: ignore[arg-type]
        self.gate.std = self.experts.std = config.initializer_range

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the update (B, T, C) and the router's logits (B·T, E)."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])  # (B·T, C)
        logits, weights, chosen = self.gate(rows)
        return self.experts(rows, chosen, weights).view_as(hidden_states), logits


def balance_loss(config: "CrossLayerConfig", logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """Return Mixtral's loss for balanced use of experts (Switch Transformer, eq. 4-6).

    `logits` are the routers', (B·T, E) each; `mask` (B, T) excludes padding.
    """
    options = (config.num_local_experts, config.num_experts_per_tok, mask)
    loss = load_balancing_loss_func(logits, *options)  # type: ignore[arg-type]
    assert isinstance(loss, Tensor)
    return loss

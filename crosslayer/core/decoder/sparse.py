"""A mixture of experts in the place of an MLP: transformers' own sparse block of Mixtral.

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


class _Drawn(Mixing):
    """Weights that begin as other matrices do."""

    std = 0.02

    def reset(self) -> None:
        for parameter in self.parameters():
            init.normal_(parameter, mean=0.0, std=self.std)


class Router(MixtralTopKRouter, _Drawn):
    """Mixtral's router."""


class Experts(MixtralExperts, _Drawn):  # type: ignore[misc]
    """Mixtral's experts."""


class SparseMLP(MixtralSparseMoeBlock):
    """Mixtral's block, which also returns what its router says; its weights keep their names."""

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
    """Return the loss that evens out how much experts are used (Switch Transformer, eq. 4-6), as Mixtral does.

    `logits` are the routers', (B·T, E) each; `mask` (B, T) leaves padding out.
    """
    options = (config.num_local_experts, config.num_experts_per_tok, mask)
    loss = load_balancing_loss_func(logits, *options)  # type: ignore[arg-type]
    assert isinstance(loss, Tensor)
    return loss

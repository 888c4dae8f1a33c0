"""How the decoder is sharded over ranks: transformers' tensor-parallel styles by module.

Every rank holds the same slice of heads in all layers, so what layers lend one another stays on its rank.
"""

from typing import Any

import torch
from torch import nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel

COMPENSATION = "crosslayer_compensation"
PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
# small and whole on every rank, which sees its own heads alone: gradients are summed
NORMS = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
MIXERS = "layers.*.self_attn.mixers.*"


class CompensationParallel(ColwiseParallel):
    """W_c before W_o writes heads, and is split as they are; W_c on a whole update stays whole on every rank."""

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        """Split the weight over the outputs where these are heads."""
        if module.target == "heads":
            super().shard_param(module, param, mesh)

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        """Let the forward see the rank's own slice where it is split."""
        return super().install_forward(module, mesh) if module.target == "heads" else module


if torch.distributed.is_available():
    ALL_PARALLEL_STYLES.register(COMPENSATION, CompensationParallel())  # type: ignore[arg-type]


def tensor_parallel_plan(qk_norm: bool, mixes: bool, compensates: bool) -> dict[str, str]:
    """Return the styles of the modules that a decoder has; without the optional ones, which would be warned of."""
    plan = dict(PLAN)
    plan |= dict.fromkeys(NORMS if qk_norm else (), "replicated_with_grad_allreduce")
    plan |= {MIXERS: "replicated_with_grad_allreduce"} if mixes else {}
    return plan | ({"layers.*.compensation": COMPENSATION} if compensates else {})

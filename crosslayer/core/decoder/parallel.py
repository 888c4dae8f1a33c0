"""How the decoder is sharded over ranks: the tensor-parallel style of each module.

Every rank holds the same slice of heads in all layers, so that states that layers share never leave their rank.
"""

from typing import Any

import torch
from torch import nn
from transformers.integrations.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ReplicatedWithGradAllReduce,
    TensorParallelLayer,
)

from crosslayer.core.method import FROM_VALUES, Config, Method, Mixing, Wiring

# styles of our own: replicated modules whose inputs, hence gradients, are the same on every rank; methods' modules
WHOLE = "crosslayer_whole"
BY_HEAD = "crosslayer_by_head"
PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
EXPERTS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
# small and replicated on every rank, which has only its own heads: gradients are summed
NORMS = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
MIXERS = "layers.*.self_attn.mixers.*"
READER = "layers.*.self_attn.reader"

# linear attention is replicated
LINEAR = {
    f"layers.*.linear_attn.{name}": WHOLE
    for name in (
        *("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"),
        *("forget_gate.f_a_proj", "forget_gate.f_b_proj"),
    )
}

# the input and output of a W_c on a sublayer's update are replicated, hence its gradient too; a W_c before W_o writes
# heads, and is split like them
COMPENSATION = {
    "attention": ("layers.*.attn_compensation", WHOLE),
    "heads": ("layers.*.self_attn.compensation", "colwise"),
    "mlp": ("layers.*.mlp_compensation", WHOLE),
    FROM_VALUES: ("layers.*.self_attn.compensation", WHOLE),
}


class MixingParallel(TensorParallelLayer):
    """A method's module within attention, which processes only the heads of its rank.

    Parameters in `split_by_head` are split; others are replicated, and their gradients are summed.
    """

    def should_use_local_tensors(self, module: Mixing) -> bool:  # type: ignore[override]
        """Return whether the parameters are split, and so are plain tensors in the module's forward."""
        return bool(module.split_by_head)

    def shard_param(self, module: Mixing, param: str, mesh: Any) -> None:
        """Split a parameter by head."""
        if param not in module.split_by_head:
            return
        # missing in builds without torch.distributed
        from torch.distributed.tensor import Shard, distribute_tensor

        # every rank has the whole parameter: nothing is sent
        whole = module.get_parameter(param)
        split = distribute_tensor(whole, mesh, [Shard(module.split_by_head[param])], src_data_rank=None)
        module.register_parameter(param, nn.Parameter(split, requires_grad=whole.requires_grad))

    def install_forward(self, module: Mixing, mesh: Any) -> Mixing:
        """Wrap the module's forward."""
        # each rank sees its own heads alone: otherwise a mixer's λ got the gradient of one rank
        if not module.split_by_head:
            ReplicatedWithGradAllReduce().install_forward(module, mesh)
        return super().install_forward(module, mesh)


if torch.distributed.is_available():
    ALL_PARALLEL_STYLES.register(WHOLE, TensorParallelLayer())  # type: ignore[arg-type]
    ALL_PARALLEL_STYLES.register(BY_HEAD, MixingParallel())  # type: ignore[arg-type]


def tensor_parallel_plan(config: Config, wiring: Wiring) -> dict[str, str]:
    """Return the styles of the modules that the model has; transformers would warn about others."""
    # a W_c of all heads' values needs them on one rank, so that attention is not split at all
    whole = FROM_VALUES in wiring.compensation
    plan = {"embed_tokens": "embedding_rowwise", **(dict.fromkeys(PLAN, WHOLE) if whole else PLAN)}
    plan |= config.components.mlp_split if config.num_local_experts is None else EXPERTS
    if config.components.learned_positions:
        plan["embed_positions"] = WHOLE
    if wiring.linear:
        plan |= LINEAR
    if config.qk_norm:
        plan |= dict.fromkeys(NORMS, WHOLE if whole else "replicated_with_grad_allreduce")
    if any(type(method).heads is not Method.heads for method in wiring.methods):
        plan[MIXERS] = WHOLE if whole else BY_HEAD
    if any(wiring.reads_several):
        plan[READER] = WHOLE if whole else BY_HEAD
    return plan | dict(COMPENSATION[target] for target in wiring.compensation if target is not None)

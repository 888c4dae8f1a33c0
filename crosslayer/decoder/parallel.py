"""How the decoder is sharded over ranks: transformers' tensor-parallel styles by module.

Every rank holds the same slice of heads in all layers, so what layers lend to each other stays on its rank.
"""

from collections.abc import Collection

import torch
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

WHOLE = "crosslayer_whole"
PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
PLAIN_MLP = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
GATED_MLP = {"layers.*.mlp.gate_proj": "colwise", **PLAIN_MLP}
EXPERTS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
# small and whole on every rank, which sees its own heads alone: gradients are summed
NORMS = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
MIXERS = "layers.*.self_attn.mixers.*"

# linear attention stays whole
LINEAR = {
    f"layers.*.linear_attn.{name}": WHOLE
    for name in (
        *("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"),
        *("forget_gate.f_a_proj", "forget_gate.f_b_proj"),
    )
}

# W_c on a whole update reads and writes what every rank has whole, so its gradient is whole too; W_c before W_o writes
# heads, and is split as they are
COMPENSATION = {
    "attention": ("layers.*.attn_compensation", WHOLE),
    "heads": ("layers.*.self_attn.compensation", "colwise"),
    "mlp": ("layers.*.mlp_compensation", WHOLE),
}

if torch.distributed.is_available():
    ALL_PARALLEL_STYLES.register(WHOLE, TensorParallelLayer())  # type: ignore[arg-type]


def tensor_parallel_plan(qk_norm: bool, mixes: bool, targets: Collection[str | None]) -> dict[str, str]:
    """Return the styles of the modules beside MLPs; without the optional ones, which would be warned of.

    Args:
        qk_norm: whether queries and keys have norms.
        mixes: whether a method mixes states of attention.
        targets: where W_c of the layers write, None for a layer without it.

    """
    plan = dict(PLAN)
    if qk_norm:
        plan |= dict.fromkeys(NORMS, "replicated_with_grad_allreduce")
    if mixes:
        plan[MIXERS] = "replicated_with_grad_allreduce"
    for target, (name, style) in COMPENSATION.items():
        if target in targets:
            plan[name] = style
    return plan

"""Tiny random models of families that share across depth or carry the residual otherwise."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from tests.helpers.tiny import BASE

GQA = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
INDEX = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}

SHIPPED: dict[str, dict] = {
    "gemma3n_text": {
        **GQA, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": 8, "laurel_rank": 4,
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {
        **GQA, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": 8, "global_head_dim": 16,
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "mistral_large4_text": {
        **EXPERTS, **LATENT, **INDEX, "num_hidden_layers": 6, "qk_rope_head_dim": 4,
        "no_rope_layers": [1, 1, 1, 0, 0, 1], "kv_source_layers": [0, 1, 1, 3, 3, 1],
        "indexer_types": ["full", "full", "shared", "full", "full", "shared"],
    },
    "deepseek_v4": {
        **EXPERTS, **INDEX, "num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 4,
        "sliding_window": 8, "partial_rotary_factor": 0.5, "num_hash_layers": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
    },
    "glm5_next_text": {
        **EXPERTS, **LATENT, **INDEX, "q_lora_rank": 8, "index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "full", "shared"],
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    },
    "glm_moe_dsa": {
        **EXPERTS, **LATENT, **INDEX, "num_hidden_layers": 4, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    },
    "hy_v4": {
        **EXPERTS, **LATENT, **INDEX, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen4_exp_text": {
        **GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "hc_lowrank": 4,
        "shared_expert_intermediate_size": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    },
    "inkling2_text": {
        **GQA, **EXPERTS, "num_hidden_layers": 4, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1,
        "swa_head_dim": 16, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16, "n_layers_per_attn_res_block": 2,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], "unpadded_vocab_size": 64,
    },
}  # fmt: skip
BODIES = ("mistral_large4_text", "glm5_next_text")  # whose language model comes only with a vision tower


def needs(family: str) -> pytest.MarkDecorator:
    """Mark a test of a family that transformers 5.19 lacks: `mistral_large4` came with 5.22, `inkling2` with 5.23."""
    return pytest.mark.skipif(family not in CONFIG_MAPPING, reason=f"this version of transformers has no {family}")


def families(*names: str) -> list:
    """Parameters of a test, one a family, marked by `needs`."""
    return [pytest.param(name, marks=needs(name)) for name in names]


def shipped(family: str, dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """Build a random model of a family, all of its weights random."""
    config = AutoConfig.for_model(family, **{**BASE, **SHIPPED[family], **changes})
    torch.manual_seed(0)
    auto = AutoModel if family in BODIES else AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()

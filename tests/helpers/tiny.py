"""Tiny random models of many families, for tests: 3 layers, hidden 32, float64."""

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from crosslayer.core.transformers_versions import attention_that_caps
from crosslayer.testing.tiny import VOCABULARY, tokens

__all__ = ["BASE", "CAUSAL", "ENCODERS", "LENGTH", "VOCABULARY", "tiny", "tokens"]
LENGTH = 24  # of `tokens`
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA = {"num_key_value_heads": 2}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

CAUSAL: dict[str, dict] = {
    "llama": GQA,
    "mistral": {**GQA, "sliding_window": 8},
    "qwen2": GQA,
    "qwen3": {**GQA, "head_dim": 16},
    "gemma": {**GQA, "head_dim": 8},
    "gemma2": {**GQA, "head_dim": 8, "attn_logit_softcapping": 2.0, **SLIDING},
    "gemma3_text": {**GQA, "head_dim": 8, **SLIDING},
    "olmo": GQA,
    "olmo2": GQA,
    "phi": {},
    "phi3": GQA,
    "gpt_neox": {},
    "gpt2": {"n_inner": 48},
    "smollm3": GQA,
    "granite": {**GQA, "residual_multiplier": 0.3},
    "cohere": GQA,
    "cohere2": {**GQA, **SLIDING},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {**GQA, "num_local_experts": 2},
    "qwen3_moe": {**GQA, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 8},
    "stablelm": GQA,
    "starcoder2": GQA,
    "deepseek_v3": {
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "gpt_oss": {**GQA, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, **SLIDING},
    "qwen3_next": {
        **GQA, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
}  # fmt: skip
ENCODERS: dict[str, dict] = {
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 32, "n_heads": 4, "hidden_dim": 48, "n_layers": 3},
}


def tiny(
    family: str, implementation: str | None = None, dtype: torch.dtype = torch.float64, **changes
) -> PreTrainedModel:
    """Build a random model whose norms and biases are random as well."""
    options = {**BASE, **(CAUSAL.get(family) or ENCODERS.get(family) or {}), **changes}
    config = AutoConfig.for_model(family, **options)
    implementation = implementation or attention_that_caps(config)
    auto = AutoModel if family in ENCODERS else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=implementation, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()

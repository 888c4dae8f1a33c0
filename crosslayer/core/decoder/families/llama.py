"""Llama: RMSNorm, a gated MLP, rotary positions; Mistral, Mixtral and Qwen differ from it only in config fields."""

from crosslayer.core.decoder.families import Family, ModelType

EXPERTS = ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits")

FAMILY = Family(
    supports=("vllm", "export"),
    model_types={
        "llama": ModelType(("attention_bias", "mlp_bias")),
        "mistral": ModelType(("sliding_window",)),
        "mixtral": ModelType(("sliding_window", *EXPERTS)),
        "qwen2": ModelType(("sliding_window", "layer_types"), {"attention_bias": True, "attention_output_bias": False}),
        "qwen3": ModelType(("attention_bias", "sliding_window", "layer_types"), {"qk_norm": True}),
    },
)

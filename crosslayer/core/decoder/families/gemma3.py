"""Gemma 3: Gemma 2's components; norms on queries and keys, and rotary positions by layer type, are config fields."""

from dataclasses import replace

from crosslayer.core.decoder.families import ModelType, gemma2

FAMILY = replace(
    gemma2.FAMILY,
    supports=(),  # vLLM was not tested
    model_types={
        "gemma3_text": ModelType(
            ("attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar", "final_logit_softcapping"),
            fixed={"qk_norm": True},
            renamed={"hidden_activation": "hidden_act"},
        )
    },
)

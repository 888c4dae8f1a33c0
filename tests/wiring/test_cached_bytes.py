"""The plan of a small config.json is the bytes that transformers' own model caches, whatever names its fields have."""

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, DynamicCache

import crosslayer
from crosslayer.core.transformers_versions import CACHE
from tests.helpers.allocation import held_bytes

NEWEST = pytest.mark.skipif(CACHE != "cache", reason="the classes are those of the newest supported transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 64}
GQA = {**SIZES, "num_key_value_heads": 2}
MROPE = {**GQA, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
NAMED = {name: value for name, value in GQA.items() if name != "num_hidden_layers"} | {"num_layers": 5, "head_dim": 8}
OLD = {"n_embd": 32, "n_layer": 5, "n_head": 4, "vocab_size": 64}
EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_shared_experts": 1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", GQA),
    ("qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen2", {**GQA, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}),
    ("mistral", {**GQA, "sliding_window": 8}),
    ("mistral", {**GQA, "sliding_window": 8, "use_sliding_window": False}),  # which its class does not know
    ("gemma3_text", {**GQA, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}),
    ("qwen2_vl", MROPE),
    ("qwen2_vl", {"text_config": MROPE}),
    ("qwen2_5_vl", {**MROPE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("exaone", NAMED),
    ("gpt2", OLD),
    ("gpt2", {**OLD, "num_hidden_layers": 3}),  # two names of one field
    ("bloom", {"hidden_size": 32, "n_layer": 5, "n_head": 4, "vocab_size": 64}),
    ("mpt", {"d_model": 32, "n_layers": 5, "n_heads": 4, "vocab_size": 64}),
    ("falcon", {**SIZES, "multi_query": False}),
    ("falcon", {**SIZES, "multi_query": True}),  # Falcon 7B
    ("falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),  # 40B and 180B: all query heads
    ("gpt2", {**OLD, "multi_query": True}),  # keys that these classes do not have
    *((kind, {**OLD, "num_key_value_heads": 2, "rotary_dim": 4}) for kind in ("gptj", "codegen", "gpt2")),
    *((kind, {**SIZES, "num_key_value_heads": 2}) for kind in ("gpt_neox", "gpt_neox_japanese", "opt", "persimmon")),
    ("bloom", {"hidden_size": 32, "n_layer": 5, "n_head": 4, "vocab_size": 64, "num_key_value_heads": 2}),
    ("mpt", {"d_model": 32, "n_layers": 5, "n_heads": 4, "vocab_size": 64, "num_key_value_heads": 2}),
    (
        "nemotron_h",
        {
            **GQA, **EXPERTS, "layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"], "head_dim": 8,
            "mamba_head_dim": 8, "mamba_num_heads": 4, "mamba_n_groups": 2, "n_groups": 4, "ssm_state_size": 4,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    ("jamba", {**GQA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4}),
]  # fmt: skip
LENGTH = 24
FOREIGN = {  # of other types, each of which would change the plan
    "new_decoder_architecture": True, "multi_query": True, "v_head_dim": 3, "dim_head": 3, "kv_lora_rank": 5,
    "hc_mult": 4, "use_mla": False, "prompt_length": 3, "keys_hold_values": True, "cross_attention_layers": [0],
    "no_rope_layers": [0] * 5, "loop_num_passes": 2, "residual_methods": ["resformer"],
    "n_layers_per_attn_res_block": 2,
}  # fmt: skip
PLAIN = {**{kind: OLD for kind in ("gpt2", "gptj")}, **{kind: GQA for kind in ("llama", "qwen2", "gpt_neox", "opt")}}
PLAIN["gemma"] = {**GQA, "head_dim": 16}


def held(fields: dict[str, Any]) -> int:
    """Return the bytes that the model's cache holds after one pass."""
    text = CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields)).get_text_config(decoder=True)
    model, cache = AutoModel.from_config(text).eval(), DynamicCache(config=text)
    with torch.no_grad():
        model(input_ids=torch.ones(1, LENGTH, dtype=torch.long), use_cache=True, **{CACHE: cache})
    return sum(held_bytes(layer) for layer in cache.layers)


@NEWEST
@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_the_plan_is_what_the_model_caches(model_type, fields, tmp_path):
    fields = {"model_type": model_type, "torch_dtype": "float32", **fields}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert crosslayer.plan(tmp_path, length=LENGTH).stored_bytes == held(fields) > 0


@NEWEST
@pytest.mark.parametrize("model_type", PLAIN)
def test_fields_that_a_class_does_not_have_change_nothing(model_type, tmp_path):
    fields = {"model_type": model_type, "torch_dtype": "float32", "rotary_dim": 4, **PLAIN[model_type]}
    plans = []
    for more in ({}, FOREIGN, {"head_dim": 3} if PLAIN[model_type] is OLD else {}):
        (tmp_path / "config.json").write_text(json.dumps({**fields, **more}))
        plans.append(crosslayer.plan(tmp_path, length=LENGTH))
    assert plans[0] == plans[1] == plans[2] and plans[0].stored_bytes == held({**fields, **FOREIGN})

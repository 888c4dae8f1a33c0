"""Configs as they are published: older names, fields at the top level, fields that transformers' classes ignore."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

import crosslayer
from crosslayer.core.transformers_versions import CACHE
from crosslayer.wiring.fields import DECODERS, ENCODERS
from crosslayer.wiring.source import NAMES, SIZES
from tests.cli.test_cli import run

NEWEST = pytest.mark.skipif(CACHE != "cache", reason="the classes are those of the newest supported transformers")
QWEN_VL = {
    "num_hidden_layers": 28, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28,
    "vision_config": {"depth": 32},
}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
HUNYUAN = {"hidden_size": 6400, "num_attention_heads": 80, "num_key_value_heads": 8, "num_hidden_layers": 64}
MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GLM_DSA = {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 6, "num_attention_heads": 64,
    "num_key_value_heads": 64, **MLA, "q_lora_rank": 2048, "index_head_dim": 128, "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_types": ["full"] * 3 + ["shared"] * 3, "layer_types": ["deepseek_sparse_attention"] * 6,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3,
}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 6, "num_attention_heads": 32,
    "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba"], "num_key_value_heads": 2,
    "head_dim": 128, "mamba_head_dim": 64, "mamba_num_heads": 64, "n_groups": 8, "ssm_state_size": 128,
    "conv_kernel": 4, "expand": 2,
}  # fmt: skip
COUNTED: dict[str, tuple[dict[str, Any], int, int]] = {  # fields → layers, bytes of a token
    "flat Qwen2.5-VL": (
        {
            **QWEN_VL, "model_type": "qwen2_5_vl", "hidden_size": 3584, "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        28,
        57_344,
    ),
    "flat Qwen2-VL": (
        {"model_type": "qwen2_vl", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, **QWEN_VL},
        28,
        28_672,
    ),
    "flat PaddleOCR-VL": (
        {
            "model_type": "paddleocr_vl", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 12,
            "num_key_value_heads": 2, "head_dim": 128,
        },
        12,
        12_288,
    ),
    "EXAONE's num_layers": (
        {
            "model_type": "exaone", "hidden_size": 2560, "num_layers": 30, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 80,
        },
        30,
        76_800,
    ),
    "a draft model": ({**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, 1, 4096),
    "a reward model": (
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_hidden_layers": 32}, 32, 131_072,
    ),
    "a decoder without a head": ({**LLAMA, "architectures": ["LlamaModel"], "num_hidden_layers": 2}, 2, 8192),
    "older names of layer types": (GLM_DSA, 6, 2 * (6 * (512 + 64) + 3 * 128)),
    "layers that differ": (
        {**LLAMA, "num_hidden_layers": 3, "per_layer_config": {"1": {"num_key_value_heads": 2}}}, 3, 9216,
    ),
    "MLA that is off": (
        {
            "model_type": "deepseek_v2", "hidden_size": 1280, "num_hidden_layers": 12, "num_attention_heads": 10,
            "num_key_value_heads": 10, **dict.fromkeys(MLA, 0), "use_mla": False,
        },
        12,
        2 * 12 * 2 * 1280,
    ),
    "MLA that is off, with null": (
        {
            "model_type": "deepseek_v3", "hidden_size": 1280, "num_hidden_layers": 12, "num_attention_heads": 10,
            "num_key_value_heads": 10, **dict.fromkeys(MLA, 0), "kv_lora_rank": None, "use_mla": False,
        },
        12,
        2 * 12 * 2 * 1280,
    ),
}  # fmt: skip
STEP = {
    "model_type": "step3p7", "num_hidden_layers": 10, "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 128,
    "num_key_value_heads": 2, "sliding_window": 512, "layer_types": ["sliding_attention"] * 8 + ["full_attention"] * 2,
}  # fmt: skip
CLA = {**LLAMA, "model_type": "hunyuan_v1_moe", "num_hidden_layers": 32, "head_dim": 128, "cla_share_factor": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # fields → what the line names
    "Step 3.7, flat": (STEP, "num_hidden_layers"),
    "CLA": ({**CLA, "use_cla": True}, "use_cla"),
    "CLA by its factor": (CLA, "cla_share_factor"),
    "another name of a size": ({**LLAMA, "n_layers": 30}, "n_layers"),
    "older names that a class has dropped": ({"model_type": "falcon", "n_layer": 5, "n_head": 4}, "n_layer, n_head"),
    "shared layers of a type without": ({**LLAMA, "num_kv_shared_layers": 10}, "num_kv_shared_layers"),
    "a text model under another name": (
        {"model_type": "llava", "language_config": {"num_hidden_layers": 10}},
        "language_config.num_hidden_layers",
    ),
}


COMMON = (  # fields as the hub has them
    ("llama", {"num_hidden_layers": 16, "num_key_value_heads": 8}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"num_hidden_layers": 28, "use_sliding_window": False, "max_window_layers": 21, "sliding_window": 32768}),
    ("qwen3", {"num_hidden_layers": 36, "max_window_layers": 36, "head_dim": 128, "num_key_value_heads": 8}),
    ("qwen3_moe", {"num_hidden_layers": 48, "use_sliding_window": False, "sliding_window": 4096}),
    ("gemma2", {"num_hidden_layers": 42, "sliding_window": 4096}),
    ("gemma3_text", {"num_hidden_layers": 26, "sliding_window_pattern": 6, "sliding_window": 512}),
    ("gemma3", {"text_config": {"num_hidden_layers": 34, "model_type": "gemma3_text"}}),
    ("gemma4_text", {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
    ("gpt_oss", {"num_hidden_layers": 24}),
    ("gpt2", {"n_layer": 24, "n_head": 16, "n_embd": 1024}),
    ("phi3", {"sliding_window": 262144}),
    ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    ("mamba2", {"num_hidden_layers": 24, "state_size": 64}),
    ("jamba", {"num_hidden_layers": 16}),
    ("qwen3_next", {"num_hidden_layers": 12}),
    ("exaone", {"num_layers": 30}),
    ("gpt2", {"num_hidden_layers": 3}),
    ("qwen2_vl", {"text_config": {"num_hidden_layers": 28, "num_key_value_heads": 2}}),
    ("llava", {"text_config": {"model_type": "mistral", "num_hidden_layers": 28}}),
    ("glm_moe_dsa", {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}),
)
PUBLISHED = json.loads((Path(__file__).parents[1] / "helpers" / "published_configs.json").read_text())


def written(tmp_path, fields):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"torch_dtype": "bfloat16", "vocab_size": 102_400, **fields}))
    return file


@NEWEST
@pytest.mark.parametrize("name", COUNTED)
def test_what_the_file_says_is_counted(name, tmp_path):
    fields, layers, token = COUNTED[name]
    plan = crosslayer.plan(written(tmp_path, fields), length=1000)
    assert (len(plan.layers), plan.stored_bytes) == (layers, 1000 * token)


@NEWEST
@pytest.mark.parametrize("fields", [{"model_type": name, **fields} for name, fields in COMMON] + [*PUBLISHED.values()])
def test_a_file_is_what_its_class_makes_of_it(fields, tmp_path):
    plan = crosslayer.plan(written(tmp_path, fields))
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads((tmp_path / "config.json").read_text()))
    assert (plan.layers, plan.plan) == (crosslayer.plan(config).layers, crosslayer.plan(config).plan)


def test_all_names_of_sizes_are_known():
    elsewhere = {"num_heads", "qk_rope_head_dim", "num_encoder_attention_heads"}  # of other parts, in other types
    for model_type in (DECODERS | ENCODERS) & {*CONFIG_MAPPING}:
        names = {other: size for size, other in CONFIG_MAPPING[model_type].attribute_map.items() if size in SIZES}
        assert {other: NAMES.get(other) for other in names.keys() - elsewhere}.items() <= names.items(), model_type


@NEWEST
@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_does_not_read_is_refused(name, tmp_path):
    fields, named = REFUSED[name]
    with pytest.raises(ValueError, match=named) as error:
        crosslayer.plan(written(tmp_path, fields))
    assert "--like" in str(error.value) and "\n" not in str(error.value)


def test_sharing_that_is_off_does_not_matter(tmp_path):
    plan = crosslayer.plan(written(tmp_path, {**CLA, "use_cla": False}), length=1000)
    assert plan.stored_bytes == 1000 * 32 * 2 * 8 * 128 * 2


@NEWEST
def test_older_names_of_recurrent_layers(tmp_path):
    plan = crosslayer.plan(written(tmp_path, NEMOTRON_H), length=1000)
    assert plan.plan.keys == (None, None, None, 3, None, None)
    assert plan.stored_bytes == 1000 * 2 * 2 * 128 * 2 + plan.fixed_bytes
    assert plan.fixed_bytes == 3 * (2 * 4 * (64 * 64 + 2 * 8 * 128) + 4 * 64 * 64 * 128)


@pytest.mark.parametrize(
    "fields",
    [
        {**LLAMA, "architectures": ["LlamaBidirectionalModel"]},
        {"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
        {"model_type": "bert-generation", "architectures": ["BertGenerationEncoder"]},
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
    ],
)
def test_encoders_on_a_type_of_decoders(fields, tmp_path):
    assert not crosslayer.plan(written(tmp_path, fields)).caches


def test_pruned_layers_without_pruned_types(tmp_path):
    fields = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16}
    with pytest.raises(ValueError, match="layer_types .* 20 .* 28") as error:
        crosslayer.plan(written(tmp_path, {**fields, "layer_types": ["full_attention"] * 28}))
    assert "validat" not in str(error.value) and "\n" not in str(error.value)


def test_a_type_that_transformers_does_not_know(tmp_path, monkeypatch, capsys):
    file = written(tmp_path, {"model_type": "hunyuan", **HUNYUAN})
    with pytest.raises(ValueError, match=r"'hunyuan'.*\.gguf.*--like TYPE"):
        crosslayer.plan(file)
    assert run(monkeypatch, "plan", file, "--like", "llama", "--length", 1000) == 0
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["type"] == "llama" and headline["stored_bytes"] == 1000 * 64 * 2 * 8 * 80 * 2
    with pytest.raises(ValueError, match="use_cla"):
        crosslayer.plan(written(tmp_path, {"model_type": "hunyuan", **HUNYUAN, "use_cla": True}), like="llama")


def test_like_reads_as_the_named_type(tmp_path):
    fields = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, **MLA}
    for model_type in ({"model_type": "kimi_k2"}, {}):
        plan = crosslayer.plan(written(tmp_path, {**model_type, **fields}), like="deepseek_v3", length=1000)
        assert plan.stored_bytes == 1000 * 61 * (512 + 64) * 2
    with pytest.raises(ValueError, match="'no_such_type'"):
        crosslayer.plan(written(tmp_path, fields), like="no_such_type")
    with pytest.raises(ValueError, match="--like must"):
        crosslayer.plan("smollm2", like="llama")

"""Configs of DeciLM, published or exported here: layers that differ in heads, or lack attention."""

import json
from typing import Any

import pytest

import crosslayer
from tests.cli.test_cli import run
from tests.verbs.export.models import ours, words


def block(group: int | None, **attention: Any) -> dict[str, Any]:
    beside = {"num_sink_tokens": None, "sparsify": None, "unshifted_sink": False, "window_length": None}
    no_op = {"no_op": group is None, "replace_with_linear": False}
    return {"attention": {"n_heads_in_group": group, **no_op, **beside, **attention}, "ffn": {"ffn_mult": 2.5}}


def nemotron(*blocks: Any) -> dict[str, Any]:
    return {
        "architectures": ["DeciLMForCausalLM"], "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "block_configs": list(blocks), "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": None,
        "model_type": "nemotron-nas", "num_attention_heads": 64, "num_hidden_layers": len(blocks),
        "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3"}, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": 128_256,
    }  # fmt: skip


def test_a_published_config(tmp_path):
    linear = block(None, no_op=False, replace_with_linear=True)
    (tmp_path / "config.json").write_text(json.dumps(nemotron(block(8), block(None), block(16), linear)))
    plan = crosslayer.plan(tmp_path, length=100)
    assert plan.type == "nemotron-nas" and plan.plan.keys == (0, None, 2, None)
    assert plan.layer_bytes == tuple(100 * 2 * heads * 128 * 2 for heads in (8, 0, 4, 0))


@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        ([block(8, window_length=4096)], "window_length"),
        ([block(7)], "n_heads_in_group"),
        ([{"ffn": {}}], "layer 0"),
        ([block(8), 3], "layer 1"),
    ],
)
def test_what_blocks_cannot_be(blocks, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(nemotron(*blocks)))
    with pytest.raises(ValueError, match=named) as error:
        crosslayer.plan(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps({**nemotron(block(8)), "num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="block_configs"):
        crosslayer.plan(tmp_path)


def test_a_field_that_llama_does_not_read_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**nemotron(block(8)), "use_cla": True}))
    with pytest.raises(ValueError, match="use_cla"):
        crosslayer.plan(tmp_path)


@pytest.mark.parametrize("shape", ["without attention", "both", "without MLPs"])
def test_a_folder_exported_here(shape, tmp_path, monkeypatch):
    model = ours(shape)
    crosslayer.export(model, tmp_path / "out", words(), to="deci")
    plan = crosslayer.plan(tmp_path / "out", length=100, dtype="float32")
    assert plan.stored_bytes == crosslayer.plan(model, length=100, dtype="float32").stored_bytes > 0
    assert run(monkeypatch, "generate", tmp_path / "out", "a whale", "--max-new-tokens", 4) == 0

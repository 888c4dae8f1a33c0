"""The table of defaults says what transformers' config classes say, wherever it says anything."""

import dataclasses
import random
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from crosslayer.core.transformers_versions import CACHE
from crosslayer.wiring.defaults import agrees, by_class, plainly
from crosslayer.wiring.plain_config import defaults, plain_config

NEWEST = pytest.mark.skipif(CACHE != "cache", reason="the table is of the newest supported transformers")
COMMON = (
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
)


@NEWEST
@pytest.mark.parametrize(("model_type", "fields"), COMMON)
def test_configs_as_the_hub_has_them_need_no_class(model_type, fields):
    values = {"model_type": model_type, "torch_dtype": "bfloat16", **fields}
    plain = plainly(values)
    assert isinstance(plain, dict) and plain == by_class(values) and plain["dtype"] == "bfloat16"


@NEWEST
@pytest.mark.parametrize("part", range(8))
def test_the_table_agrees_with_the_classes(part):
    """A few fields of each model type are changed at once; the table was written by changing one at a time."""
    chosen = random.Random(part)
    types = sorted(name for name in defaults() if name in CONFIG_MAPPING)[part::8]
    for model_type in types:
        whole = [one for one in dataclasses.fields(CONFIG_MAPPING[model_type]) if type(one.default) in (int, bool)]
        values: dict[str, Any] = {"model_type": model_type}
        for one in chosen.sample(whole, min(3, len(whole))):
            default: Any = one.default
            values[one.name] = not default if isinstance(default, bool) else default + chosen.choice((0, 8))
        assert agrees(values), values


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "no_such_type"},
        {"model_type": "qwen2", "use_sliding_window": True},  # the class decides on the layers
        {"model_type": "gemma3_text", "sliding_window_pattern": 4},
        {"model_type": "gemma2", "layer_types": ["full_attention"]},  # of 26 layers
        {"model_type": "gemma2", "layer_pattern": "LG"},  # nobody knows what it means
        {"model_type": "llama", "per_layer_config": {"3": {"num_key_value_heads": 2}}},
        {"model_type": "gemma3", "text_config": {"model_type": "no_such_type"}},
    ],
)
def test_what_the_table_does_not_know_is_left_to_transformers(values):
    assert plain_config(values) is None

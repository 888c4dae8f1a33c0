"""The table of defaults says what transformers' config classes say, wherever it says anything."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.config_defaults import UNDECLARED, by_class, others, plainly, smallest, verdict
from crosslayer.core.transformers_versions import CACHE
from crosslayer.wiring.plain_config import defaults, plain_config
from crosslayer.wiring.transformers_config import mentioned

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
    ("exaone", {"num_layers": 30}),
    ("gpt2", {"num_hidden_layers": 3}),
    ("qwen2_vl", {"text_config": {"num_hidden_layers": 28, "num_key_value_heads": 2}}),
    ("llava", {"text_config": {"model_type": "mistral", "num_hidden_layers": 28}}),
    ("glm_moe_dsa", {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}),
)


@NEWEST
@pytest.mark.parametrize(("model_type", "fields"), COMMON)
def test_configs_as_the_hub_has_them_need_no_class(model_type, fields):
    values = {"model_type": model_type, "torch_dtype": "bfloat16", **fields}
    plain = plainly(values)
    assert isinstance(plain, dict) and plain == by_class(values) and plain["dtype"] == "bfloat16"


PUBLISHED = json.loads((Path(__file__).parents[1] / "helpers" / "published_configs.json").read_text())


@NEWEST
@pytest.mark.parametrize("name", PUBLISHED)
def test_common_models_need_no_class_with_all_their_fields(name):
    assert verdict(PUBLISHED[name])


def random_values(model_type: str, chosen: random.Random) -> dict[str, Any]:
    """Return a config.json with a few random fields, under any name that its class may take; its text's may be flat."""
    kind: Any = CONFIG_MAPPING[model_type]
    values: dict[str, Any] = smallest(model_type)
    text = defaults().get(model_type, {}).get("text")
    if text is not None:
        part = random_values(text[1], chosen)
        if chosen.random() < 0.5:
            return {**values, text[0]: part}
        return {**part, **values}
    declared = {one.name: one.default for one in dataclasses.fields(kind)}
    pool = {name: [*others(value), value] for name, value in declared.items() if others(value)}
    pool |= {alias: pool[name] for alias, name in kind.attribute_map.items() if name in pool}
    known = set(pool)
    pool |= dict.fromkeys(mentioned(kind) - declared.keys() - pool.keys() - set(dir(kind)), [3, True])
    pool |= dict.fromkeys(UNDECLARED, [2, 3])
    names = [name for name in sorted(pool) if name in mentioned(kind) or not name.endswith(("_id", "_theta", "_rate"))]
    if chosen.random() < 0.5:
        names = [name for name in names if name in known]
    for name in chosen.sample(names, min(len(names), chosen.randint(1, 4))):
        values[name] = chosen.choice(pool[name])
    for name in ("num_hidden_layers", "num_layers"):
        if type(values.get(name)) is int and chosen.random() < 0.5:
            values["layer_types"] = chosen.choices(("full_attention", "sliding_attention", "mamba"), k=values[name])
    return values


@NEWEST
@pytest.mark.parametrize("part", range(8))
def test_the_table_agrees_with_the_classes(part):
    """Random configs of each type: a few fields under any of their names; a text model's nested or at the top."""
    chosen = random.Random(part)
    verdicts = []
    for model_type in sorted(defaults())[part::8]:
        for _ in range(3):
            values = random_values(model_type, chosen)
            verdicts.append(verdict(values))
            assert verdicts[-1] is not False, values
    assert verdicts.count(True) > 0.15 * len(verdicts)


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
        {"model_type": "gemma3", "text_config": {"model_type": "llama"}},  # its class takes another for it
        {"model_type": "gemma3", "num_hidden_layers": 34},  # of its text model
        {"model_type": "llava", "language_config": {"num_hidden_layers": 34}},
        {"model_type": "llama", "num_layers": 30},
        {"model_type": "mistral", "use_sliding_window": False},  # which the class does not know
        {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["attention"]},  # an older name
        {"model_type": "gpt2", "n_layer": 5, "num_hidden_layers": 3},  # two names of one field
        {"model_type": "hunyuan_v1_moe", "use_cla": True},
        {"model_type": "llama", "a_field_of_someone": 3},
    ],
)
def test_what_the_table_does_not_know_is_left_to_transformers(values):
    assert plain_config(values) is None

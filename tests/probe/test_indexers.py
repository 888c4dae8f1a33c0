"""Shared indexers: a what-if against transformers' own sharing, and choices that a model cannot follow."""

import pytest
import torch
from transformers import AutoConfig

import crosslayer
from crosslayer.core.methods import load_methods
from crosslayer.core.transformers_versions import CACHE
from crosslayer.probe.indexers import can_share, indexer_types, pattern, with_choices
from crosslayer.probe.what_if import find_sublayers, what_if
from crosslayer.verbs.retrofit.convert import convert_weights
from tests.helpers.shipped import INDEX, families, shipped
from tests.helpers.tiny import tiny, tokens

GROUPS = {  # of layers that take the first one's choice; glm5_next has linear attention below
    "glm_moe_dsa": ((0, 1), (2, 3)),
    "hy_v4": ((0, 1, 2),),
    "mistral_large4_text": ((0, 1, 2), (3, 4, 5)),  # layer 5 rotates, layer 4 does not
    "glm5_next_text": ((1, 2),),
}
OWN = {"glm5_next_text": {"indexer_types": ["full", "full", "full"]}}


def method_of(groups):
    return {"name": "shared_choice", "groups": groups, "tokens": 8, "sinks": 0, "window": 1}


def outputs(model, ids, **options):
    result = model(ids, **options)
    return result.logits if "logits" in result else result.last_hidden_state


@pytest.mark.parametrize("family", families(*GROUPS))
@torch.no_grad()
def test_a_what_if_is_the_converted_model(family):
    """The converted model is of transformers' own class, which passes the indices on by itself."""
    model = shipped(family, **OWN.get(family, {}))
    ids = tokens(batch=2, length=24)
    method = load_methods(method_of(GROUPS[family]))
    plain = outputs(model, ids)
    with what_if(model, method):
        tried = outputs(model, ids)
    converted = convert_weights(model, method)
    after = outputs(converted.model, ids)
    assert torch.equal(tried, after) and (tried - plain).abs().max() > 0.01
    assert torch.equal(outputs(model, ids), plain)  # nothing is left behind
    readers = {reader for _, *group in GROUPS[family] for reader in group}
    assert all(".indexer." in name for name in converted.weights.dropped)
    assert {int(name.split("layers.")[1].split(".")[0]) for name in converted.weights.dropped} <= readers
    choices = crosslayer.plan(converted.model).plan.choices
    assert [choices[reader] for first, *group in GROUPS[family] for reader in group] == [
        first for first, *group in GROUPS[family] for _ in group
    ]


@torch.no_grad()
def test_with_a_cache():
    """Token by token, in a what-if and converted; with many heads, of whose scores few are all 0, as ties would be."""
    model, ids = shipped("glm_moe_dsa", index_n_heads=32), tokens(batch=2, length=24)
    method = load_methods(method_of(GROUPS["glm_moe_dsa"]))
    converted = convert_weights(model, method).model
    whole = converted(ids).logits

    def decoded(decoder):
        cache, rows = {}, []
        for token in ids.T:
            step = decoder(token[:, None], use_cache=True, **cache)
            cache = {CACHE: step[CACHE]}
            rows.append(step.logits[:, 0])
        return torch.stack(rows, 1)

    with what_if(model, method):
        tried = decoded(model)
    assert (decoded(converted) - whole).abs().max() < 1e-4 and (tried - whole).abs().max() < 1e-4


@torch.no_grad()
def test_the_pattern_is_what_transformers_reads():
    model = shipped("glm_moe_dsa")
    converted = convert_weights(model, load_methods(method_of(((0, 1), (2, 3))))).model
    letters = pattern(crosslayer.plan(converted).plan.choices)
    assert letters == "FSFS"
    config = model.config.to_dict()
    del config["indexer_types"]
    read = AutoConfig.for_model(**config, index_topk_pattern=letters)
    assert read.indexer_types == converted.config.indexer_types == ["full", "shared", "full", "shared"]


@torch.no_grad()
def test_a_model_without_a_field_for_sharing_can_be_tried():
    """DeepSeek-V3.2: vLLM shares its indexers, transformers does not."""
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    model = tiny("deepseek_v32", dtype=torch.float32, **sizes, **experts, **INDEX)
    ids = tokens(batch=1, length=24)
    assert indexer_types(model) == ["full"] * 3 and not can_share(model.config)
    with what_if(model, method_of(((0, 1, 2),))):
        tried = outputs(model, ids)
    assert (tried - outputs(model, ids)).abs().max() > 1e-4


def test_choices_that_a_model_cannot_follow():
    assert with_choices(["full"] * 4, (None, 0, 0, None)) == ["full", "shared", "shared", "full"]
    assert with_choices(["full", "shared", "full"], (None, None, 0)) == ["full", "shared", "shared"]
    with pytest.raises(ValueError, match="layer 2 cannot take the choice of layer 0: .* indexer, and the nearest .* 1"):
        with_choices(["full"] * 3, (None, None, 0))
    with pytest.raises(ValueError, match="layer 0 has no indexer, so it cannot take the choice of layer 0"):
        with_choices([None, "full"], (0, None))
    with pytest.raises(ValueError, match="layer 2 cannot take the choice of layer 1: .* and there is none"):
        with_choices([None, "shared", "full"], (None, None, 1))
    with pytest.raises(ValueError, match="layer 3 cannot take the choice of layer 0"):
        find_sublayers(shipped("glm_moe_dsa")).check(load_methods(method_of(((0, 3),)))[0].plan(4))

"""Rotary positions by layer type: Gemma 3 equals transformers' Gemma 3, and what cannot hold them refuses them."""

import pytest
import torch
from transformers import DynamicCache

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.core.decoder.convert import from_config, to_model
from crosslayer.core.decoder.families import RotaryByType
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing.tiny import build, close, config_of
from crosslayer.verbs.export.formats import stock_model
from crosslayer.verbs.export.run import refusal
from crosslayer.verbs.serve.caches import not_servable
from tests.helpers.cases import GEMMA3
from tests.helpers.tiny import tiny, tokens

WINDOW, FULL = "sliding_attention", "full_attention"
LOCAL, GLOBAL = {"rope_type": "default", "rope_theta": 100.0}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
ROPE = {WINDOW: LOCAL, FULL: GLOBAL}
BY_TYPE = {"sliding_window": 5, "layer_types": [WINDOW, FULL] * 3, "rope_parameters": ROPE}
MQA = {"num_key_value_heads": 1, "num_hidden_layers": 6, "layer_types": [WINDOW] * 5 + [FULL], "rope_parameters": ROPE}


def pair(implementation="sdpa", **changes):
    source = tiny("gemma3_text", implementation, **{**MQA, **changes})
    return source, to_model(source)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [4, 24, 60])
@torch.no_grad()
def test_logits_are_gemmas_within_a_window_and_beyond(implementation, length):
    source, ours = pair(implementation)
    ids = tokens(length=length)
    assert ours.config._attn_implementation == implementation
    close(ours(ids).logits, source(ids).logits, "logits")


@torch.no_grad()
def test_padded_and_cached_logits_are_gemmas():
    source, ours = pair()
    ids, mask = tokens(length=20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    caches = [DynamicCache(config=model.config) for model in (source, ours)]
    for first, last in ((0, 11), (11, 12), (12, 20)):  # across the window of 8
        options = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
        piece = ids[:, first:last]
        expected, result = (
            model(piece, **options, **{CACHE: cache}).logits
            for model, cache in zip((source, ours), caches, strict=True)
        )
        seen = mask[:, first:last].bool()
        close(result[seen], expected[seen], f"tokens {first} to {last}")
    assert [layer.keys.shape[2] for layer in caches[1].layers] == [7] * 5 + [20]


@torch.no_grad()
def test_generated_tokens_are_gemmas():
    source, ours = pair()
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    for more in ({}, {"num_beams": 2}, {"use_cache": False}):
        made = [model.generate(tokens(), **options, **more) for model in (source, ours)]
        assert torch.equal(*made)


def test_gradients_are_gemmas():
    source, ours = pair()
    for model in (source, ours):
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    expected = dict(source.named_parameters())
    for name, weight in ours.named_parameters():
        close(weight.grad, expected[name].grad, name)


@torch.no_grad()
def test_each_layer_type_has_its_own_tables(tmp_path):
    model, ids = build(config_of([], **BY_TYPE)), tokens()
    assert isinstance(model.model.rotary_emb, RotaryByType)
    tables = model.model.add_positions(model.model.embed_tokens(ids), torch.arange(24)[None])[1]
    assert set(tables) == {WINDOW, FULL} and not torch.equal(tables[WINDOW][0], tables[FULL][0])
    for layer_type, rope in ROPE.items():
        alone = build(config_of([], rope_parameters=rope)).model
        _, expected = alone.add_positions(alone.embed_tokens(ids), torch.arange(24)[None])
        close(tables[layer_type][1], expected[FULL][1], layer_type)
    model.save_pretrained(tmp_path)
    loaded = CrossLayerForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.rope_parameters == ROPE and torch.equal(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
def test_model_types_get_the_form_that_they_have():
    same = config_of([], **{**BY_TYPE, "qk_norm": True, "rope_parameters": {WINDOW: dict(LOCAL), FULL: dict(LOCAL)}})
    assert from_config(same, "qwen3").rope_parameters == LOCAL
    with pytest.raises(ValueError, match="qwen3 cannot express rope_parameters by layer type"):
        from_config(config_of([], **BY_TYPE, qk_norm=True), "qwen3")
    source, ids = build(config_of([], **{**GEMMA3, "rope_parameters": dict(GLOBAL)})), tokens()
    stock = stock_model(source)
    assert stock.config.rope_parameters == {WINDOW: GLOBAL, FULL: GLOBAL}
    with torch.no_grad():
        close(stock(ids).logits, source(ids).logits, "logits")
    plain = {**GEMMA3, "layer_types": [FULL] * 6, "sliding_window": None, "rope_parameters": dict(GLOBAL)}
    source = build(config_of([], **plain))  # the stock class wants a window that no layer has
    with torch.no_grad():
        close(stock_model(source)(ids).logits, source(ids).logits, "logits without windows")


def test_what_knows_one_set_of_parameters_refuses_others():
    config = config_of([], **BY_TYPE)
    assert all("by layer type" in str(refusal(config, to)) for to in ("hf", "deci", "gguf"))
    assert "by layer type" in str(not_servable(config))
    assert "family 'gemma3' is untested" in str(not_servable(config_of([], **GEMMA3)))


@pytest.mark.parametrize("rope", [{WINDOW: LOCAL}, {WINDOW: LOCAL, FULL: None}, {**ROPE, "factor": 2.0}], ids=str)
def test_other_forms_are_refused(rope):
    with pytest.raises(
        ValueError, match="an entry for each of full_attention, sliding_attention and nothing else, got"
    ):
        config_of([], **{**BY_TYPE, "rope_parameters": rope})

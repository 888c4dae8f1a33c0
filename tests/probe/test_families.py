"""Many families: every layer with attention is visited, outputs are bit-equal, everything is restored."""

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import crosslayer
from crosslayer.probe.visit import attention_layers, layer_stack, visited
from tests.tiny import BASE, CAUSAL, ENCODERS, tiny, tokens

FAMILIES = [*CAUSAL, *ENCODERS]


def output(model, ids):
    found = model(input_ids=ids)
    return found.logits if "logits" in found else found.last_hidden_state


def test_there_are_enough_families():
    assert len(FAMILIES) >= 18


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_visited_and_outputs_are_bit_equal(family):
    model, ids = tiny(family, dtype=torch.float32), tokens()
    implementation = model.config._attn_implementation
    with torch.no_grad():
        plain = output(model, ids)
        calls = []
        with visited(model, calls.append):
            probed = output(model, ids)
    assert torch.equal(plain, probed)
    assert [call.layer for call in calls] == attention_layers(model.config)
    assert model.config._attn_implementation == implementation
    assert not [name for name in AttentionInterface._global_mapping if name.startswith("crosslayer")]
    assert not [name for name in AttentionMaskInterface._global_mapping if name.startswith("crosslayer")]


@pytest.mark.parametrize("family", FAMILIES)
def test_diagnosis_leaves_the_model_as_it_was(family):
    model, ids = tiny(family, dtype=torch.float32).train(), tokens()
    model.eval()
    with torch.no_grad():
        plain = output(model, ids)
    model.train()
    found = crosslayer.diagnose(model, ids).record()
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        assert torch.equal(plain, output(model.eval(), ids))
    with_attention = set(attention_layers(model.config))
    for name, measure in found["measures"].items():
        assert len(measure["mean"]) == 3, name
        for layer, value in enumerate(measure["mean"]):
            row = value if isinstance(value, list) else [value]
            about_attention = name not in (
                "hidden_norm_ratio",
                "layer_io_similarity",
                "stream_norm",
                "token_similarity",
            )
            missing = about_attention and not name.startswith("mlp") and layer not in with_attention
            assert all(v is None for v in row) if missing else any(v is not None for v in row), (name, layer)


@pytest.mark.parametrize("family", ["falcon", "bloom"])
def test_models_that_attend_by_themselves_raise(family):
    names = {"n_head": 4, "n_layer": 3} if family == "bloom" else {}
    model = tiny(family, **names)
    with pytest.raises(ValueError, match=f"{family}.*itself"), visited(model, lambda call: None):
        model(tokens())
    with pytest.raises(ValueError, match=family):
        crosslayer.diagnose(model, tokens())


def test_shared_layers_and_encoder_decoders_raise():
    albert = AutoModel.from_config(AutoConfig.for_model("albert", **{**BASE, "embedding_size": 16}))
    with pytest.raises(ValueError, match="no list of 3 layers"):
        layer_stack(albert)
    t5 = AutoConfig.for_model("t5", d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=64)
    with pytest.raises(ValueError, match="encoder-decoder"):
        layer_stack(AutoModel.from_config(t5))


def test_a_layer_that_was_not_visited_is_named():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*layers \[0, 1, 2\]"), visited(model, lambda call: None):
        pass


def test_everything_is_restored_after_an_exception():
    model, ids = tiny("mistral"), tokens()

    def fail(call):
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), visited(model, fail):
        model(ids)
    assert model.config._attn_implementation == "sdpa"
    assert not [name for name in AttentionInterface._global_mapping if name.startswith("crosslayer")]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_both_implementations_are_delegated_to(implementation):
    model, ids = tiny("mistral", implementation), tokens()
    with torch.no_grad():
        plain = model(ids).logits
        with visited(model, lambda call: None):
            assert torch.equal(plain, model(ids).logits)


def test_nested_visits_both_see_and_restore():
    model, ids, seen = tiny("llama"), tokens(), []
    with (
        torch.no_grad(),
        visited(model, lambda c: seen.append("outer")),
        visited(model, lambda c: seen.append("inner")),
    ):
        model(ids)
    assert seen == ["outer", "inner"] * 3
    assert model.config._attn_implementation == "sdpa"

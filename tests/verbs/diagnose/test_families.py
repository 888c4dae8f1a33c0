"""Many families: every layer with attention is visited, outputs are bit-equal, everything is restored."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import AttentionInterface

import crosslayer
from crosslayer.probe import intercept
from crosslayer.probe.intercept import intercepted, visited
from crosslayer.probe.model import attention_layers, layer_stack
from crosslayer.probe.stream import streams
from crosslayer.testing import tiny as contract
from tests.helpers.tiny import BASE, CAUSAL, ENCODERS, tiny, tokens

FAMILIES = [*CAUSAL, *ENCODERS]
# measures that a layer without attention has, too; those of MLPs begin with mlp
OF_STREAMS = ("hidden_norm_ratio", "layer_io_similarity", "depth_factor", "stream_norm", "token_similarity")


def output(model, ids):
    computed = model(input_ids=ids)
    return computed.logits if "logits" in computed else computed.last_hidden_state


def test_there_are_enough_families():
    assert len(FAMILIES) >= 18


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_visited_and_outputs_are_bit_equal(family):
    model, ids = tiny(family, dtype=torch.float32), tokens()
    implementation, registered = model.config._attn_implementation, dict(AttentionInterface._global_mapping)
    with torch.no_grad():
        plain = output(model, ids)
        calls = []
        with visited(model, calls.append):
            probed = output(model, ids)
    assert torch.equal(plain, probed)
    assert [call.layer for call in calls] == attention_layers(model.config)
    assert model.config._attn_implementation == implementation
    assert AttentionInterface._global_mapping == registered


@pytest.mark.parametrize("family", FAMILIES)
def test_diagnosis_leaves_the_model_as_it_was(family):
    model, ids = tiny(family, dtype=torch.float32).train(), tokens()
    model.eval()
    with torch.no_grad():
        plain = output(model, ids)
    model.train()
    record = crosslayer.diagnose(model, ids).record()
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        assert torch.equal(plain, output(model.eval(), ids))
    with_attention = set(attention_layers(model.config))
    for name, measure in record["measures"].items():
        assert len(measure["mean"]) == 3, name
        for layer, value in enumerate(measure["mean"]):
            row = value if isinstance(value, list) else [value]
            missing = name not in OF_STREAMS and not name.startswith("mlp") and layer not in with_attention
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
    with pytest.raises(ValueError, match="3 layers"):
        layer_stack(albert)
    t5 = AutoConfig.for_model("t5", d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=64)
    with pytest.raises(ValueError, match="encoder-decoder"):
        layer_stack(AutoModel.from_config(t5))


def test_a_layer_that_was_not_visited_is_named():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*layers \[0, 1, 2\]"), visited(model, lambda call: None):
        pass


def test_everything_is_restored_after_an_exception():
    model, ids, registered = tiny("mistral"), tokens(), dict(AttentionInterface._global_mapping)

    def fail(call):
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), visited(model, fail):
        model(ids)
    assert AttentionInterface._global_mapping == registered and not intercept._watched


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


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_two_models_are_watched_at_once_and_a_third_passes_through(implementation):
    first, second, third = (tiny(family, implementation) for family in ("llama", "mistral", "gemma3_text"))
    registered, ids, seen = dict(AttentionInterface._global_mapping), tokens(), []
    with torch.no_grad():
        plain = [model(ids).logits for model in (first, second, third)]
        with visited(first, lambda c: seen.append("first")), visited(second, lambda c: seen.append("second")):
            watched = [model(ids).logits for model in (first, second, third)]
    assert all(map(torch.equal, plain, watched)) and seen == ["first"] * 3 + ["second"] * 3
    assert AttentionInterface._global_mapping == registered and not intercept._watched


MLPS = {
    "llama": lambda layer: layer.mlp,
    "gpt2": lambda layer: layer.mlp,
    "gpt_neox": lambda layer: layer.mlp,
    "cohere": lambda layer: layer.mlp,
    "mixtral": lambda layer: layer.mlp,
    "opt": lambda layer: layer.fc2,
    "bert": lambda layer: layer.output.dense,
    "roberta-prelayernorm": lambda layer: layer.output.dense,
    "distilbert": lambda layer: layer.ffn,
    "falcon_h1": lambda layer: layer.feed_forward,
}


@pytest.mark.parametrize("family", MLPS)
def test_the_mlp_is_the_right_one(family):
    changes = {"num_key_value_heads": 4} if family == "falcon_h1" else {}
    model, ids, seen, expected = tiny(family, dtype=torch.float32, **changes), tokens(batch=1), [], []
    hooks = [
        MLPS[family](layer).register_forward_hook(
            lambda _, args, out: expected.append((out[0] if isinstance(out, tuple) else out).reshape(-1, 32))
        )
        for layer in layer_stack(model)
    ]
    with torch.no_grad(), streams(model, seen.append):
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    assert all(torch.equal(stream.mlp_update, update) for stream, update in zip(seen, expected, strict=True))


def test_adapters_do_not_hide_the_linear_layer():
    class Wrapped(nn.Module):  # the shape of a PEFT layer
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.lora_B = base, nn.Linear(2, 32)

        def forward(self, x):
            return self.base_layer(x)

    model, ids = tiny("bert", dtype=torch.float32), tokens()
    plain = crosslayer.diagnose(model, ids).measures
    for layer in model.encoder.layer:
        layer.attention.output.dense = Wrapped(layer.attention.output.dense)
        layer.output.dense = Wrapped(layer.output.dense)
    assert crosslayer.diagnose(model, ids).measures == plain


def test_learned_positions_bound_the_length():
    model = tiny("gpt2", dtype=torch.float32)
    with pytest.raises(ValueError, match="length 65.*model's 64"):
        crosslayer.diagnose(model, tokens(length=65))
    roberta = tiny("roberta", dtype=torch.float32, pad_token_id=1)
    with pytest.raises(ValueError, match="length 64.*model's 62"):
        crosslayer.diagnose(roberta, tokens(length=64))


def test_broken_activations_are_one_clear_error():
    model = tiny("llama", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match="layer 0.*float32"):
        crosslayer.diagnose(model, tokens())


def test_undefined_ratios_are_none_and_the_report_is_still_written(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
    diagnosis = crosslayer.diagnose(model, tokens())
    assert diagnosis.measures.value_norm_ratio.mean == [None] * 3 and np.isnan(diagnosis.value_norm_ratio).all()
    assert diagnosis.save(tmp_path / "out").is_file()


def test_each_module_keeps_its_training_flag():
    model = tiny("llama", dtype=torch.float32).train()
    model.model.layers[1].eval()
    crosslayer.diagnose(model, tokens())
    assert model.training and not model.model.layers[1].training and model.model.layers[2].training


@pytest.mark.parametrize(
    "methods", [["cla"], ["svformer"], [{"name": "drop", "attention": (0, 2), "mlp": (1,)}], ["resformer"]]
)
def test_cross_layer_models_can_be_diagnosed(methods):
    model = contract.build(contract.config_of(methods))
    diagnosis = crosslayer.diagnose(model, tokens())
    plan = model.config.plan
    assert np.isfinite(diagnosis.entropy).tolist() == [plan.attends(i) for i in range(6)]
    assert diagnosis.verdict.cache.elements == contract.predicted(model.config, 1, 24)


def test_nothing_is_left_behind_when_a_model_is_refused():
    sizes = {"num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
    model = AutoModel.from_config(AutoConfig.for_model("t5", **sizes))
    registered = dict(AttentionInterface._global_mapping)
    with pytest.raises(ValueError, match="is an encoder-decoder"), intercepted(model, lambda call: call):
        pass
    assert AttentionInterface._global_mapping == registered
    assert not intercept._watched and not intercept._replaced

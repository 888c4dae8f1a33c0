"""Norms of what sublayers add, and of the gradient of the loss by it, against hooks and `backward`."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from crosslayer.probe.depth import log_slope, output_norms
from crosslayer.probe.stream import streams
from crosslayer.testing.tiny import build, config_of
from tests.helpers.cases import CAPPED, GPT2
from tests.helpers.tiny import CAUSAL, tiny, tokens

MODELS = {
    "llama": lambda: tiny("llama"),
    "gpt2": lambda: tiny("gpt2"),
    "gpt_neox": lambda: tiny("gpt_neox"),  # attention and MLP read the same stream
    "ours": lambda: build(config_of([])),
    "uniattn": lambda: build(config_of({"name": "uniattn", "superblocks": ((2, 3),), "compensation": "mlp"})),
    "attnres": lambda: build(config_of("attnres")),
    "attnres, gpt2": lambda: build(config_of("attnres", **GPT2)),
    "gemma2": lambda: build(config_of([], **CAPPED)),
    "gemma2, transformers": lambda: tiny("gemma2"),
    "gemma3": lambda: tiny("gemma3_text"),
    "olmo2": lambda: tiny("olmo2"),
}
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")  # whose products know no float64
PARALLEL = ("phi", "gpt_neox", "cohere", "cohere2")  # attention and MLP read the same stream
MULTIPLIED = {"granite": 0.3}  # of what a sublayer adds, behind its output


def summed_loss(model, ids):
    logits = model(ids[None], use_cache=False).logits[0]
    return functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


def modules(model, layer):
    """Attention and MLP of a layer."""
    block = getattr(model.base_model, "layers", None) or model.base_model.h
    block = block[layer]
    if (
        getattr(block, "post_feedforward_layernorm", None) is not None
    ):  # the norms behind the sublayers make what is added
        return block.post_attention_layernorm, block.post_feedforward_layernorm
    return (
        getattr(block, "self_attn", None) or getattr(block, "attn", None) or block.attention,
        block.mlp,
    )


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_those_of_what_modules_return_and_of_what_autograd_finds(name):
    model, ids = MODELS[name](), tokens(batch=1, length=9)[0]
    found = output_norms(model, ids)
    layers = model.config.num_hidden_layers
    for number, sublayer in enumerate(("attention", "mlp")):
        for layer in range(layers):
            module, kept = modules(model, layer)[number], {}

            def keep(_, args, output, kept=kept):
                kept["output"] = output[0] if isinstance(output, tuple) else output
                kept["output"].retain_grad()

            handle = module.register_forward_hook(keep)
            loss = summed_loss(model, ids)
            handle.remove()
            loss.backward()
            output = kept["output"].reshape(9, -1)
            gradient = kept["output"].grad.reshape(9, -1)
            size, slope = output.norm(dim=1).mean().item(), gradient.norm(dim=1).mean().item()
            assert found[f"{sublayer}_output_norm"][layer] == pytest.approx(size, rel=1e-5)
            assert found[f"{sublayer}_gradient_norm"][layer] == pytest.approx(slope, rel=1e-4)
    assert all(np.isfinite(norms).all() and norms.shape == (layers,) for norms in found.values())


@pytest.mark.parametrize("family", [name for name in CAUSAL if name not in PARALLEL])
def test_what_sublayers_add_is_the_difference_of_the_stream(family):
    """In families with a norm behind the MLP (Gemma 2 and 3, OLMo 2), the MLP's own output is something else."""
    precision = torch.float32 if family in EXPERTS else torch.float64
    model, ids, seen = tiny(family, dtype=precision), tokens(batch=1, length=9), []
    with torch.no_grad(), streams(model, seen.append):
        model(ids, use_cache=False)
    assert len(seen) == model.config.num_hidden_layers
    for stream in seen:
        states = [stream.before, stream.after_attention, stream.after]
        for update, (before, after) in zip(stream.updates, pairwise(states), strict=True):
            if stream.after_attention is None:  # a layer without softmax attention
                break
            added = update.reshape(9, -1) * MULTIPLIED.get(family, 1)
            torch.testing.assert_close(added, after - before, atol=1e-5 if family in EXPERTS else 1e-12, rtol=1e-5)


def test_frozen_weights_and_the_mode_stay():
    model, ids = tiny("llama").requires_grad_(False).train(), tokens(batch=1, length=9)[0]
    with torch.no_grad():
        found = output_norms(model, ids)
    assert np.isfinite(found["attention_gradient_norm"]).all()
    assert model.training and not any(weight.requires_grad or weight.grad is not None for weight in model.parameters())
    thawed = tiny("llama")
    assert output_norms(thawed, ids)["mlp_gradient_norm"] == pytest.approx(found["mlp_gradient_norm"], rel=1e-6)
    assert all(weight.grad is None for weight in thawed.parameters())


def test_a_layer_without_a_sublayer_has_no_norm():
    model = build(config_of({"name": "drop", "attention": (1,), "mlp": (2,)}))
    found = output_norms(model, tokens(batch=1, length=9)[0])
    assert [*np.isnan(found["attention_output_norm"])] == [False, True, False, False, False, False]
    assert [*np.isnan(found["mlp_gradient_norm"])] == [False, False, True, False, False, False]


def test_the_slope_over_depth_leaves_out_layers_without_a_norm():
    layers = np.arange(6.0)
    norms = 3 * np.exp(0.25 * layers)
    assert log_slope(norms) == pytest.approx(0.25, rel=1e-12)
    norms[2], norms[4] = np.nan, 0
    assert log_slope(norms) == pytest.approx(0.25, rel=1e-12)
    assert np.isnan(log_slope(np.array([1.0, np.nan])))

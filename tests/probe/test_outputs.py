"""Norms of what sublayers add, and of the gradient of the loss by it, against hooks and `backward`."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from crosslayer.probe.depth import output_norms
from crosslayer.testing.tiny import build, config_of
from tests.helpers.cases import CAPPED, GPT2
from tests.helpers.tiny import tiny, tokens

MODELS = {
    "llama": lambda: tiny("llama"),
    "gpt2": lambda: tiny("gpt2"),
    "gpt_neox": lambda: tiny("gpt_neox"),  # attention and MLP read the same stream
    "ours": lambda: build(config_of([])),
    "uniattn": lambda: build(config_of({"name": "uniattn", "superblocks": ((2, 3),), "compensation": "mlp"})),
    "attnres": lambda: build(config_of("attnres")),
    "attnres, gpt2": lambda: build(config_of("attnres", **GPT2)),
    "gemma2": lambda: build(config_of([], **CAPPED)),
}


def summed_loss(model, ids):
    logits = model(ids[None], use_cache=False).logits[0]
    return functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


def modules(model, layer):
    """Attention and MLP of a layer."""
    block = getattr(model.base_model, "layers", None) or model.base_model.h
    block = block[layer]
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
            if name != "gemma2" or sublayer == "mlp":  # there a norm follows attention, and its output is added
                assert found[f"{sublayer}_output_norm"][layer] == pytest.approx(
                    output.norm(dim=1).mean().item(), rel=1e-5
                )
                expected = gradient.norm(dim=1).mean().item()
                assert found[f"{sublayer}_gradient_norm"][layer] == pytest.approx(expected, rel=1e-4)
    assert all(np.isfinite(norms).all() and norms.shape == (layers,) for norms in found.values())


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

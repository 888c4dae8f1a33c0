"""The mean key of a layer, which a quantized cache subtracts: over families, rotary layouts and dtypes."""

from functools import partial

import pytest
import torch

from crosslayer.cache.offsets import TOKENS, key_offsets
from crosslayer.cache.quantizers import rotated
from crosslayer.cache.running import smaller_cache
from crosslayer.corpus.domains import embedded_domains, split_domains
from crosslayer.models.load import load_model
from crosslayer.probe.intercept import visited
from crosslayer.probe.model import layer_stack
from crosslayer.testing.tiny import tokens
from tests.helpers.quantized import add_key_biases, shift_of
from tests.helpers.tiny import CAUSAL, tiny

FLOAT32 = 1e-5  # transformers computes norms and rotary tables in float32 whatever the dtype


def mean_keys(model):
    """Return the mean key of each attention module before rotation, (1, H_kv, 1, D), over the text of `key_offsets`."""
    means, hooks = {}, []

    def note(module, _, args, states):
        states = states.chunk(3, -1)[1] if hasattr(module, "c_attn") else states  # GPT-2
        states = states.view(TOKENS, -1, module.head_dim)  # (T, H_kv, D)
        means[module] = states[1:].mean(0)[None, :, None]

    for layer in layer_stack(model):
        if hasattr(layer, "attn"):
            keys_of, module = layer.attn.c_attn, layer.attn
        else:
            keys_of, module = getattr(layer.self_attn, "k_norm", None) or layer.self_attn.k_proj, layer.self_attn
        hooks.append(keys_of.register_forward_hook(partial(note, module)))
    size = model.config.vocab_size
    model(torch.randint(size, (1, TOKENS), generator=torch.Generator().manual_seed(0)), use_cache=False)
    for hook in hooks:
        hook.remove()
    return means


def turned(mean, tokens, config):
    """Return a mean key at each of some tokens, turned as Llama turns it: (1, H_kv, T, D)."""
    size, base = mean.shape[-1], config.rope_parameters["rope_theta"]
    angles = torch.arange(tokens)[:, None] * base ** -(torch.arange(0, size, 2) / size)
    angles = torch.cat([angles, angles], -1)
    first, second = mean.chunk(2, -1)
    return mean * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3"])
def test_the_offset_of_keys_is_their_mean_before_rotation(family):
    model = tiny(family)
    add_key_biases(model)
    for module, mean in mean_keys(model).items():
        expected = mean if family == "gpt2" else turned(mean, 40, model.config)
        offset = shift_of(key_offsets(model)[module.layer_idx], 40)
        assert (offset - expected).abs().max() < FLOAT32 * expected.abs().max() and expected.abs().max() > 0.01


BIASED = ["qwen2", "gpt_neox", "gpt2", "opt", "phi", "starcoder2", "stablelm", "gpt_oss", "glm4", "glm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", BIASED)
def test_a_bias_of_keys_changes_their_offset_by_what_it_adds(family, dtype):
    """Whatever the names and the rotary layout of a family; in the first layer, whose input no bias changes."""
    options = {} if family in CAUSAL else {**CAUSAL["qwen3"], "attention_bias": True}
    options |= {"use_qkv_bias": True} if family == "stablelm" else {}
    model, ids = tiny(family, dtype=dtype, **options), tokens(1, 40)
    keys, offsets = [], []
    for _ in range(2):
        offsets.append(key_offsets(model)[0].at(torch.arange(40)[None]))
        with visited(model, lambda call: keys.append(rotated(call.key)) if call.layer == 0 else None):
            model(ids, use_cache=False)
        for name, parameter in layer_stack(model)[0].named_parameters():
            if name.endswith("bias") and "norm" not in name and "ln_1" not in name:
                parameter.data.zero_()
    added, offset = keys[0] - keys[1], offsets[0] - offsets[1]
    assert offset.abs().max() > 0.2
    assert (added - offset).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


def test_keys_that_a_model_turns_by_itself_have_no_offset():
    """Where a module has no tables of cos and sin, nobody can tell how its mean key turns."""
    model = tiny("gpt2")
    assert key_offsets(model).keys() == {*range(model.config.num_hidden_layers)}
    module = layer_stack(model)[0].attn
    module.c_attn.register_forward_hook(lambda _, args, out: out * torch.linspace(1, 2, out.shape[1])[:, None])
    assert 0 not in key_offsets(model) and 1 in key_offsets(model)


def test_eviction_needs_keys_without_a_large_mean_below_8_bits():
    model = tiny("qwen2")
    add_key_biases(model, size=20)
    with pytest.raises(ValueError, match="mean of keys"), smaller_cache(model, "h2o:0.4", "4"):
        pass
    with smaller_cache(model, "h2o:0.4", "8"):
        model(tokens(1, 24), use_cache=False)


@pytest.mark.slow
@torch.no_grad()
def test_4_bits_cost_a_real_model_little():
    """On one window of SmolLM2: 0.0016 nats; 0.0034 without the mean and with codes for the first token."""
    model, tokenizer = load_model("smollm2", dtype="float32")
    windows = split_domains(embedded_domains(), tokenizer, parts={"one": {"books": 1}}, length=512)["one"]
    before = model(windows.ids, use_cache=False).logits[0, 256:].log_softmax(-1)  # (T / 2, V)
    with smaller_cache(model, bits=4):
        after = model(windows.ids, use_cache=False).logits[0, 256:].log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1).mean()
    assert 0.0008 < kl < 0.0024

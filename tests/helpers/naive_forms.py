"""What llama.cpp and vLLM compute from exported files, written plainly from the files' own metadata and tensors."""

import json

import torch
from safetensors.torch import load_file
from torch.nn import functional as F


def gguf_facts(path):
    """Return metadata by key and float32 tensors by name."""
    import gguf

    reader = gguf.GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = torch.tensor(values.copy()).float()
    return facts, tensors


def gguf_logits(path, ids):
    """Return logits (T, V) of ids (T,) as llama.cpp's architectures llama and deci compute them."""
    facts, tensors = gguf_facts(path)
    kind = facts["general.architecture"]
    layers = facts[f"{kind}.block_count"]
    heads, pairs = (_by_layer(facts[f"{kind}.attention.{name}"], layers) for name in ("head_count", "head_count_kv"))
    size, eps = facts[f"{kind}.attention.key_length"], facts[f"{kind}.attention.layer_norm_rms_epsilon"]
    slowed = tensors.get("rope_freqs.weight", torch.ones(size // 2)) * facts.get(f"{kind}.rope.scaling.factor", 1.0)
    frequencies = facts[f"{kind}.rope.freq_base"] ** (-torch.arange(0, size, 2) / size) / slowed
    x = tensors["token_embd.weight"][ids]  # (T, C)
    for layer in range(layers):
        w = {name.removeprefix(f"blk.{layer}."): t for name, t in tensors.items() if name.startswith(f"blk.{layer}.")}
        if heads[layer]:
            normed = _norm(x, w["attn_norm.weight"], eps)
            if pairs[layer]:
                q, k, v = (_linear(normed, w, f"attn_{name}").unflatten(1, (-1, size)) for name in "qkv")
                q, k = _neighbors(q, frequencies), _neighbors(k, frequencies)
                normed = _attention(q, k, v).flatten(1)
            x = x + _linear(normed, w, "attn_output")
        normed = _norm(x, w["ffn_norm.weight"], eps)
        inner = F.silu(_linear(normed, w, "ffn_gate")) * _linear(normed, w, "ffn_up")
        x = x + _linear(inner, w, "ffn_down")
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    return _norm(x, tensors["output_norm.weight"], eps) @ head.T


def deci_logits(folder, ids):
    """Return logits (T, V) of ids (T,) as vLLM's DeciLM computes them."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    size, eps, heads = config["head_dim"], config["rms_norm_eps"], config["num_attention_heads"]
    frequencies = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    x = weights["model.embed_tokens.weight"][ids]  # (T, C)
    for layer, block in enumerate(config["block_configs"]):
        start = f"model.layers.{layer}."
        w = {name.removeprefix(start): t for name, t in weights.items() if name.startswith(start)}
        expected = set()
        if not block["attention"]["no_op"]:
            normed = _norm(x, w["input_layernorm.weight"], eps)
            q, k, v = (_linear(normed, w, f"self_attn.{n}_proj").unflatten(1, (-1, size)) for n in "qkv")
            assert k.shape[1] == heads // block["attention"]["n_heads_in_group"]
            out = _attention(_halves(q, frequencies), _halves(k, frequencies), v).flatten(1)
            x = x + _linear(out, w, "self_attn.o_proj")
            expected |= {"input_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo")}
        if not block["ffn"]["no_op"]:
            normed = _norm(x, w["post_attention_layernorm.weight"], eps)
            inner = F.silu(_linear(normed, w, "mlp.gate_proj")) * _linear(normed, w, "mlp.up_proj")
            assert inner.shape[1] == block["ffn"]["intermediate_size"]
            x = x + _linear(inner, w, "mlp.down_proj")
            expected |= {"post_attention_layernorm", *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))}
        assert {name.rpartition(".")[0] for name in w} == expected
    head = weights["model.embed_tokens.weight"] if config["tie_word_embeddings"] else weights["lm_head.weight"]
    return _norm(x, weights["model.norm.weight"], eps) @ head.T


def _by_layer(value, layers):
    return value if isinstance(value, list) else [value] * layers


def _norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _linear(x, weights, name):
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _angles(x, frequencies):
    angles = torch.arange(len(x))[:, None] * frequencies  # (T, D / 2)
    return angles.cos()[:, None], angles.sin()[:, None]


def _neighbors(x, frequencies):
    """Rotate entries 2i and 2i + 1 of heads (T, H, D) together."""
    cos, sin = _angles(x, frequencies)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def _halves(x, frequencies):
    """Rotate entries i and i + D / 2 of heads (T, H, D) together."""
    cos, sin = _angles(x, frequencies)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


def _attention(q, k, v):
    """Return (T, H, D) of q (T, H, D), k and v (T, H_kv, D), each token seeing itself and those before it."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(s.repeat_interleave(group, 1).transpose(0, 1) for s in (k, v))  # (H, T, D)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(0, 1)

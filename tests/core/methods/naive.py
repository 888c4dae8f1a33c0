"""A plain forward pass of the decoder by loops, with hooks where the methods' equations go.

It shares the modules (projections, norms, MLPs) with the model and nothing else, so the tolerance is that of float64.
"""

import math

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TOLERANCE = 1e-10


def softmax_map(q, k, scale):
    """Causal softmax map of one head by loops, (T, D) twice → (T, T)."""
    size = len(q)
    result = torch.zeros(size, size, dtype=q.dtype)
    for row in range(size):
        scores = [float(q[row] @ k[column]) * scale for column in range(row + 1)]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        for column, weight in enumerate(weights):
            result[row, column] = weight / sum(weights)
    return result


def project(model, layer, x, state):
    """Return q, k or v of a layer, (T, C) → (H or H_kv, T, D), with rotary embedding on q and k."""
    attention = model.model.layers[layer].self_attn
    linear = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}[state]
    split = linear(x).view(len(x), -1, attention.head_dim).transpose(0, 1)
    if state == "v":
        return split
    cos, sin = model.model.rotary_emb(x[None], torch.arange(len(x))[None])
    return apply_rotary_pos_emb(split[None], split[None], cos, sin)[0][0]


def attend(model, layer, q, k, v):
    """Return the output of all heads, (T, H·D)."""
    scale, groups = model.model.layers[layer].self_attn.scaling, len(q) // len(k)
    heads = [softmax_map(q[h], k[h // groups], scale) @ v[h // groups] for h in range(len(q))]
    return torch.cat(heads, dim=-1)


class Naive:
    """The model by loops; subclasses change `states`, `attention`, `added` or `run`."""

    def __init__(self, model):
        self.model, self.layers = model, list(model.model.layers)
        self.raw = {"q": {}, "k": {}, "v": {}}  # raw states by layer
        self.used = {"q": {}, "k": {}, "v": {}}  # states that attention took, by layer

    def states(self, layer, normed):
        """Return q, k, v of a layer."""
        return tuple(self.raw_state(layer, normed, name) for name in "qkv")

    def raw_state(self, layer, normed, name):
        self.raw[name][layer] = project(self.model, layer, normed, name)
        return self.raw[name][layer]

    def attention(self, layer, q, k, v):
        """Return what attention reads, (T, H·D), before W_o."""
        return attend(self.model, layer, q, k, v)

    def added(self, layer, normed):
        """Return what a compensation adds after W_o."""
        return 0

    def run(self, ids):
        """Return logits (T, V) of one sequence."""
        x = self.model.model.embed_tokens(ids)
        for number, layer in enumerate(self.layers):
            if layer.self_attn is not None:
                normed = layer.input_layernorm(x)
                q, k, v = self.states(number, normed)
                for name, state in zip("qkv", (q, k, v), strict=True):
                    self.used[name][number] = state
                x = x + layer.self_attn.o_proj(self.attention(number, q, k, v)) + self.added(number, normed)
            if layer.mlp is not None:
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(self.model.model.norm(x))


def check(model, naive, length=7):
    """Compare a model with its naive form on one sequence."""
    from tests.helpers.tiny import tokens

    ids = tokens(batch=1, length=length)
    with torch.no_grad():
        gap = (model(ids, use_cache=False).logits[0] - naive(model).run(ids[0])).abs().max().item()
    # a float32 norm turns a rounding of 1e-16 into 6e-8 now and then; anything wrong is above 1e-3
    assert gap < 1e-6, gap

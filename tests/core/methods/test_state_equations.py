"""The equations of methods that read several layers' states, or change values, against loops; see test_equations.py."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from crosslayer.testing.tiny import build, close, config_of
from tests.core.methods.naive import Naive, check


@pytest.mark.parametrize("source", ["first", "previous"])
def test_cross_attention(source):
    class Loops(Naive):
        def attention(self, layer, q, k, v):
            if layer == 0:
                return super().attention(layer, q, k, v)
            other = 0 if source == "first" else layer - 1
            keys, values = self.used["k"][other], self.used["v"][other]
            scale, groups, rows = q.shape[-1] ** -0.5, len(q) // len(k), []
            for head in range(len(q)):
                pair = head // groups
                for t in range(q.shape[1]):  # both halves up to the token itself
                    seen = torch.cat([keys[pair, : t + 1], k[pair, : t + 1]])
                    weights = torch.tensor([float(q[head, t] @ key) * scale for key in seen], dtype=q.dtype).softmax(0)
                    rows.append(weights @ torch.cat([values[pair, : t + 1], v[pair, : t + 1]]))
            return torch.stack(rows).unflatten(0, (len(q), -1)).transpose(0, 1).flatten(1)

    check(build(config_of([{"name": "cross_attention", "source": source}])), Loops)


@pytest.mark.parametrize(("start", "lite"), [(None, False), (2, False), (None, True)])
def test_fusedkv(start, lite):
    first_above = start or 3

    class Loops(Naive):
        def states(self, layer, normed):
            if layer < first_above:
                return super().states(layer, normed)
            q, last = self.raw_state(layer, normed, "q"), first_above - 1
            if lite:
                return q, self.used["k"][last], self.used["v"][0]
            reader = self.layers[layer].self_attn.reader
            k, v = torch.zeros_like(self.used["k"][0]), torch.zeros_like(self.used["v"][0])
            for head in range(len(k)):
                for channel in range(k.shape[-1]):
                    for index, source in enumerate((0, last)):
                        pair = channel % (k.shape[-1] // 2)
                        weight = reader.key_weights[head, index, pair]
                        k[head, :, channel] += weight * self.used["k"][source][head, :, channel]
                        weight = reader.value_weights[head, index, channel]
                        v[head, :, channel] += weight * self.used["v"][source][head, :, channel]
            return q, k, v

    check(build(config_of([{"name": "fusedkv", "start": start, "lite": lite}])), Loops)


def test_fused_keys_are_rotated_as_those_that_are_fused_before():
    """Rotary embedding of a fused key is the fused rotated key: the two channels of a pair have a weight in common."""
    model = build(config_of(["fusedkv"]))
    reader, states = model.model.layers[5].self_attn.reader, torch.randn(2, 1, 2, 7, 8, dtype=torch.float64)
    cos, sin = model.model.rotary_emb(states[0], torch.arange(7)[None])

    def rotated(state):
        return apply_rotary_pos_emb(state, state, cos, sin)[0]

    with torch.no_grad():
        before = rotated(reader(tuple(states), tuple(states), None, 7)[0])
        after = reader((rotated(states[0]), rotated(states[1])), tuple(states), None, 7)[0]
    close(after, before, "fused after the rotation")


def to_each_query_head(v, heads):
    """Values (H_kv, T, D) as those that each of the query heads reads, (T, H·D)."""
    return torch.cat([v[head // (heads // len(v))] for head in range(heads)], dim=-1)


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_identity_mapping(key_value_heads):
    class Loops(Naive):
        def attention(self, layer, q, k, v):
            out = super().attention(layer, q, k, v)
            for below in range(layer):
                out = out + to_each_query_head(self.raw["v"][below], len(q)) / layer
            return out

    check(build(config_of(["identity_mapping"], num_key_value_heads=key_value_heads)), Loops)


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("mixed", [None, "before", "after"])
def test_neutreno(mixed, key_value_heads):
    """Listed after resformer it takes the mixed values, before it the raw ones."""
    resformer, neutreno = {"name": "resformer", "mode": "constant"}, {"name": "neutreno", "weight": 0.3}
    methods = {None: [neutreno], "before": [resformer, neutreno], "after": [neutreno, resformer]}[mixed]

    class Loops(Naive):
        def states(self, layer, normed):
            q, k, v = super().states(layer, normed)
            return q, k, v if mixed is None or layer == 0 else 2 * self.raw["v"][0] + v

        def attention(self, layer, q, k, v):
            own = v if mixed == "before" else self.raw["v"][layer]
            difference = to_each_query_head(self.raw["v"][0] - own, len(q))
            return super().attention(layer, q, k, v) + 0.3 * difference

    check(build(config_of(methods, num_key_value_heads=key_value_heads)), Loops)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_yoco(window):
    class Loops(Naive):
        def states(self, layer, normed):
            q = self.raw_state(layer, normed, "q")
            if layer > 3:
                return q, self.used["k"][3], self.used["v"][3]
            return q, self.raw_state(layer, normed, "k"), self.raw_state(layer, normed, "v")

        def attention(self, layer, q, k, v):
            if layer >= 3:
                return super().attention(layer, q, k, v)
            scale, groups, rows = q.shape[-1] ** -0.5, len(q) // len(k), []
            for head in range(len(q)):
                for t in range(q.shape[1]):
                    seen = slice(max(0, t - window + 1), t + 1)
                    weights = torch.softmax(k[head // groups, seen] @ q[head, t] * scale, 0)
                    rows.append(weights @ v[head // groups, seen])
            return torch.stack(rows).unflatten(0, (len(q), -1)).transpose(0, 1).flatten(1)

    check(build(config_of([{"name": "yoco", "window": window}])), Loops)

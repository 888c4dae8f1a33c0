"""Methods that change what the residual stream is: loops, and transformers' own modules with the same weights."""

import math

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer, DeepseekV4HyperHead

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.testing.tiny import build, close, config_of
from tests.core.methods.naive import Naive, attend, check, project
from tests.helpers.tiny import tokens


class Update(nn.Module):
    """Stands for a sublayer."""

    def __init__(self, width, returns_tuple):
        super().__init__()
        self.linear, self.returns_tuple = nn.Linear(width, width), returns_tuple

    def forward(self, x, *args, **kwargs):
        return (self.linear(x), None) if self.returns_tuple else self.linear(x)


def their_layers(streams, iterations):
    """Return layers and head of DeepSeek-V4 with random weights; attention and experts are linear maps."""
    shape = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "q_lora_rank": 8, "o_lora_rank": 8}
    experts = {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1}
    config = DeepseekV4Config(
        num_hidden_layers=2, hc_mult=streams, hc_sinkhorn_iters=iterations, rms_norm_eps=1e-6, **shape, **experts
    )
    layers = [DeepseekV4DecoderLayer(config, 0), DeepseekV4DecoderLayer(config, 1)]
    for layer in layers:
        layer.self_attn, layer.mlp = Update(16, True), Update(16, False)
    modules = nn.ModuleList([*layers, DeepseekV4HyperHead(config)])
    for parameter in modules.parameters():
        nn.init.normal_(parameter, std=0.5)  # far from the start, where all streams are alike
    return modules


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (3, 2), (2, 1)])
def test_hyper_connections_are_those_of_deepseek_v4(streams, iterations, kind, monkeypatch):
    if kind is torch.float64:  # their weights are float32 whatever the dtype
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.manual_seed(0)
    *layers, head = their_layers(streams, iterations).to(kind)
    embedded = torch.randn(2, 5, 16, dtype=kind)
    expected = embedded.unsqueeze(2).expand(-1, -1, streams, -1).contiguous()
    method = {"name": "hyper_connections", "streams": streams, "iterations": iterations}
    ours = build(config_of([method], hidden_size=16, num_hidden_layers=2)).to(kind).model
    stream, carry = embedded, {}
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[kind]  # three roundings of bf16
    for layer, own in zip(layers, ours.layers, strict=True):
        expected = layer(expected)
        sites = (
            (own.attn_residual, layer.attn_hc, layer.input_layernorm, layer.self_attn.linear),
            (own.mlp_residual, layer.ffn_hc, layer.post_attention_layernorm, layer.mlp.linear),
        )
        for residual, connection, norm, linear in sites:
            residual.load_state_dict(connection.state_dict())  # their names and shapes
            read, carry = residual.read(stream, carry)
            stream, carry = residual.write(stream, linear(norm(read)), carry)
        assert stream.shape == (2, 5, streams, 16) and not carry
        close(stream, expected, "streams", tolerance * expected.abs().max().item())
    final = ours.final_residual
    final.load_state_dict({name.removeprefix("hc_"): value for name, value in head.state_dict().items()})
    close(
        final.read(stream, {})[0], head(expected), "what the final norm reads", tolerance * expected.abs().max().item()
    )


def attention(naive, number, inputs):
    """Return a layer's update from the inputs of its queries, keys and values; a shared state is the last one used."""
    block, states = naive.layers[number], []
    for name, linear in zip(
        "qkv", (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj), strict=True
    ):
        if linear is None:
            states.append(naive.used[name][max(naive.used[name])])
        else:
            states.append(project(naive.model, number, block.input_layernorm(inputs[name]), name))
        naive.used[name][number] = states[-1]
    return block.self_attn.o_proj(attend(naive.model, number, *states))


class Streams(Naive):
    """The equation of hyper-connections, number by number."""

    def weights(self, residual, rows, token):
        """Return W r of a token's streams (N, C)."""
        flat = token.flatten()
        return residual.fn[rows] @ flat / torch.sqrt((flat * flat).mean() + 1e-6)

    def read(self, residual, streams):
        """Return Σ pre X of all tokens."""
        result = []
        for token in streams:
            raw = self.weights(residual, slice(0, 3), token) * residual.scale[0] + residual.base[:3]
            result.append(sum((1 / (1 + math.exp(-raw[n])) + 1e-6) * token[n] for n in range(3)))
        return torch.stack(result)

    def write(self, residual, streams, update):
        result = torch.zeros_like(streams)
        for t, token in enumerate(streams):
            post = self.weights(residual, slice(3, 6), token) * residual.scale[1] + residual.base[3:6]
            comb = self.weights(residual, slice(6, 15), token) * residual.scale[2] + residual.base[6:]
            comb = [[math.exp(comb[3 * n + m]) for m in range(3)] for n in range(3)]
            comb = [[value / sum(row) + 1e-6 for value in row] for row in comb]
            for step in range(3):  # two iterations: columns, rows, columns
                sums = [sum(row) for row in comb] if step == 1 else [sum(column) for column in zip(*comb, strict=True)]
                comb = [[comb[n][m] / (sums[n if step == 1 else m] + 1e-6) for m in range(3)] for n in range(3)]
            for m in range(3):
                result[t, m] = sum(comb[n][m] * token[n] for n in range(3))
                result[t, m] += 2 / (1 + math.exp(-post[m])) * update[t]
        return result

    def run(self, ids):
        x = self.model.model.embed_tokens(ids)
        x = torch.stack([x, x, x], dim=1)  # (T, N, C)
        for number, layer in enumerate(self.layers):
            if layer.self_attn is not None:
                update = attention(self, number, dict.fromkeys("qkv", self.read(layer.attn_residual, x)))
                x = self.write(layer.attn_residual, x, update)
            if layer.mlp is not None:
                normed = layer.post_attention_layernorm(self.read(layer.mlp_residual, x))
                x = self.write(layer.mlp_residual, x, layer.mlp(normed))
        return self.model.lm_head(self.model.model.norm(self.read(self.model.model.final_residual, x)))


DROPS = [
    {},
    {"attention": (0, 3), "mlp": (0, 2)},  # the first sublayer is that of layer 1
    {"attention": (5,), "layers": (2, 3)},
]


@pytest.mark.parametrize("drop", DROPS, ids=str)
def test_hyper_connections(drop):
    methods = [{"name": "hyper_connections", "streams": 3, "iterations": 2}]
    check(build(config_of([*methods, *([{"name": "drop", **drop}] if drop else [])])), Streams, length=5)


def alike(methods, eps):
    """Return a fresh model of some methods, and the plain one with its weights, in float64."""
    torch.manual_seed(0)
    model = CrossLayerForCausalLM(config_of(methods, rms_norm_eps=eps)).double()
    plain = CrossLayerForCausalLM(config_of([], rms_norm_eps=eps)).double()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "residual" not in name})
    return model, plain


@torch.no_grad()
def test_hyper_connections_begin_near_a_plain_transformer():
    model, plain = alike(["hyper_connections"], 1e-30)  # the streams are read at twice their size
    ids = tokens(length=12)
    expected = plain(ids).logits
    gap = (model(ids).logits - expected).norm() / expected.norm()
    assert 1e-5 < gap < 2e-3, gap  # 4e-4; with every scale at 1 it would be 4e-2
    for name, parameter in model.named_parameters():
        if name.endswith("residual.scale"):
            parameter.zero_()
    close(model(ids).logits, expected, "without dynamic weights", 1e-5)  # ε of sigmoid and sums is 1e-6


@torch.no_grad()
@pytest.mark.parametrize("ways", ["all", "residual"])
def test_mudd_begins_as_a_plain_transformer(ways):
    model, plain = alike([{"name": "mudd", "ways": ways}], 1e-6)
    ids = tokens(length=12)
    close(model(ids).logits, plain(ids).logits, "fresh mudd and Llama", 1e-12)
    assert all(p.abs().sum() > 0 for n, p in model.named_parameters() if n.endswith("residual.inner"))


class Dense(Naive):
    """The equation of MUDD: every layer's output by itself, every weight a number."""

    def run(self, ids):
        outputs, ways = [self.model.model.embed_tokens(ids)], {}  # X_0, X_1, …
        x = outputs[0]
        for number, layer in enumerate(self.layers):
            if layer.self_attn is not None:
                x = x + attention(self, number, {name: ways.get(name, x) for name in "qkv"})
            if layer.mlp is not None:
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            residual = layer.attn_residual if layer.mlp is None else layer.mlp_residual
            if residual is not None:
                outputs.append(x)
                ways = self.sums(residual, outputs)
                x = ways["r"]
        return self.model.lm_head(self.model.model.norm(x))

    def sums(self, residual, outputs):
        names = ["r" if way is None else "qkv"[way] for way in residual.ways]
        sums = {name: torch.zeros_like(outputs[0]) for name in names}
        for t, token in enumerate(outputs[-1]):
            inner = residual.inner @ (token / torch.sqrt((token * token).mean() + 1e-6))
            inner = torch.tensor([x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in inner.tolist()], dtype=token.dtype)
            dynamic = residual.outer @ inner
            for w, name in enumerate(names):
                for j, source in enumerate(outputs):
                    share = dynamic[w * len(outputs) + j] + residual.base[w, j]
                    sums[name][t] += share * source[t]
        return sums


MUDDS = {
    "all": [],
    "residual": [{"name": "mudd", "ways": "residual"}],
    "drops": ["mudd", {"name": "drop", "attention": (2, 5), "mlp": (0, 3), "layers": (1,)}],
    "last layer dropped": ["mudd", {"name": "drop", "layers": (0, 5)}],
    "lost queries and keys": ["mudd", {"name": "uniattn", "superblocks": ((1, 2, 3),), "compensation": None}],
}


@pytest.mark.parametrize("case", MUDDS)
def test_mudd(case):
    check(build(config_of(MUDDS[case] or ["mudd"])), Dense)


def test_mudd_has_the_ways_that_are_read():
    def ways(*others):
        model = CrossLayerForCausalLM(config_of(["mudd", *others]))
        return [layer.mlp_residual.ways for layer in model.model.layers]

    assert ways() == [(0, 1, 2, None)] * 5 + [(None,)]
    assert ways("cla") == [(0, None), (0, 1, 2, None)] * 2 + [(0, None), (None,)]
    assert ways({"name": "drop", "attention": (2,)})[1] == (None,)


@torch.no_grad()
@pytest.mark.parametrize("name", ["hyper_connections", "mudd", "attnres", None])
def test_hidden_states_are_what_each_layer_reads(name):
    drop = {"name": "drop", "layers": (0, 2, 5)}
    model = build(config_of([drop] if name is None else [name, drop]))
    model.requires_grad_(False)
    read = {}
    for number, layer in enumerate(model.model.layers):
        if layer.input_layernorm is not None:
            layer.input_layernorm.register_forward_pre_hook(lambda _, args, n=number: read.setdefault(n, args[0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: read.setdefault("final", args[0]))
    states = model(tokens(length=6), output_hidden_states=True).hidden_states
    expected = [read[n] for n in (1, 1, 3, 3, 4, "final")]  # a layer without sublayers reads what is read next
    assert len(states) == 7
    for number, (state, wanted) in enumerate(zip(states, expected, strict=False)):
        assert state.shape == (2, 6, 32) and torch.equal(state, wanted), number


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([{"name": "hyper_connections", "streams": 1}], "streams must be at least 2, got 1"),
        ([{"name": "hyper_connections", "iterations": 0}], "iterations must be at least 1, got 0"),
        ([{"name": "mudd", "ways": "keys"}], "ways must be one of 'all', 'residual', got 'keys'"),
        (["mudd", "hyper_connections"], "mudd with hyper_connections: both replace the residual stream"),
        (["attnres", "cla", "mudd"], "attnres with mudd: both replace the residual stream; only one method may"),
    ],
)
def test_refused(methods, message):
    with pytest.raises(ValueError, match=message):
        config_of(methods)

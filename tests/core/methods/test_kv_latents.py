"""Latents: their equation against loops, the codes in the cache, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from crosslayer import verify
from crosslayer.core.columns import ColumnLayer
from crosslayer.core.latents import SCALE, STEPS, UNIT, CodedColumns, coded
from crosslayer.core.methods.kv_latents import KVLatents
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing.tiny import build, config_of, steps, tokens
from crosslayer.wiring.read import read_plan
from tests.core.methods.naive import Naive, check

BITS = ((4, 2, 1, 0), (8, 2, 0, 0), (3, 1, 1, 1), (7, 6, 5, 0), (2, 2, 2, 2), (1, 0, 0, 0))


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        (KVLatents(rank=0.25), {}),
        (KVLatents(groups=()), {"num_key_value_heads": 1}),
        (KVLatents(groups=((1, 2, 4), (3, 5))), {"qk_norm": True, "attention_bias": True}),
        (KVLatents(bits=BITS), {}),
        (KVLatents(bits=BITS, groups=((0, 3), (1, 2, 5))), {"qk_norm": True}),
    ],
)
def test_equation(method, shape):
    """Keys and values of a layer by loops over tokens and channels, codes rounded one by one."""
    groups = (tuple(range(6)),) if method.groups is None else method.groups
    below_of = {layer: below for group in groups for below, layer in zip(group[:-1], group[1:], strict=True)}

    class Loops(Naive):
        def __init__(self, model):
            super().__init__(model)
            self.both = {}  # keys and values (T, W) before qk-norm and rotation, by layer

        def states(self, layer, normed):
            attention = self.layers[layer].self_attn
            encoder, decoder = attention.latent_encoder, attention.latent_decoder
            rows = []
            for t, x in enumerate(normed):
                below = self.both[below_of[layer]][t] if layer in below_of else None
                latent = [row @ x + bias for row, bias in zip(encoder.down.weight, encoder.down.bias, strict=True)]
                if below is not None:
                    latent = [c - row @ below for c, row in zip(latent, encoder.below.weight, strict=True)]
                if method.bits is not None:
                    latent = coded_by_loops([float(c) for c in latent], method.bits[layer])
                row = decoder.up.bias.clone()
                for channel, c in enumerate(latent):
                    row += c * decoder.up.weight[:, channel]
                rows.append(row if below is None else row + decoder.below.weight @ below)
            self.both[layer] = torch.stack(rows)
            q, (k, v) = attention.q_proj(normed), self.both[layer].chunk(2, -1)
            q, k, v = (state.unflatten(-1, (-1, attention.head_dim)) for state in (q, k, v))  # (T, H or H_kv, D)
            if attention.q_norm is not None:
                q, k = attention.q_norm(q), attention.k_norm(k)
            q, k, v = (state.transpose(0, 1) for state in (q, k, v))
            tables = self.model.model.rotary_emb(normed[None], torch.arange(len(normed))[None])
            q, k = (apply_rotary_pos_emb(state[None], state[None], *tables)[0][0] for state in (q, k))
            return q, k, v

    check(build(config_of(method, **shape)), Loops)


def coded_by_loops(latent, bits):
    """Round each channel to the nearest of its codes; return what is read."""
    numbers = [number for number in bits for _ in range(UNIT) if number]
    scale = (sum(c * c for c in latent) / len(latent)) ** 0.5
    for c, number in zip(latent, numbers, strict=True):
        if number >= 4:
            scale = max(scale, abs(c) / (STEPS[number] * (2**number - 1) / 2))
    scale = float(torch.tensor(scale, dtype=torch.float64).to(torch.float16))
    read = []
    for c, number in zip(latent, numbers, strict=True):
        codes = [index - (2**number - 1) / 2 for index in range(2**number)]
        read.append(scale * min(codes, key=lambda code: abs(code * STEPS[number] * scale - c)))
    return read


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12).filter(any), st.integers(1, 40), st.data())
def test_the_cache_returns_what_was_stored(bits, length, data):
    """Codes come back unchanged, in any pieces, after rows were reordered and the last tokens removed."""
    bits = sorted(bits, reverse=True)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    latents = 3 * torch.randn(2, length, UNIT * sum(map(bool, bits)), generator=generator)
    stored = coded(latents, bits)[:, None]  # (B, 1, T, R + 1)
    layer = ColumnLayer(lambda: CodedColumns(bits), exact=True)
    cut = data.draw(st.integers(0, length))
    for piece in (stored[:, :, :cut], stored[:, :, cut:]):
        if piece.shape[2]:
            read, _ = layer.update(piece, piece[..., :0])
    assert torch.equal(read, stored)
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.crop(-1)
    read, _ = layer.update(stored.flip(0)[:, :, -1:], stored[:, :, -1:, :0])
    assert torch.equal(read, stored.flip(0))
    (allocated,) = {tensor.shape[2] for tensor in layer.columns[0].tensors()}
    rows = -(-length // 16) * 16
    assert allocated == rows
    assert sum(tensor.nbytes for tensor in layer.columns[0].tensors()) == 2 * rows * (sum(bits) + SCALE)


@pytest.mark.parametrize("method", [KVLatents(rank=0.25), KVLatents(bits=BITS, groups=((0, 1, 2),))])
def test_bytes_are_the_plans(method):
    config = config_of(method)
    model, ids = build(config).float(), tokens(batch=3, length=21)
    _, cache = steps(model, ids, [20, 1], DynamicCache(config=config))
    layers = [layer for layer in cache.layers if not isinstance(layer, ColumnLayer)]
    allocated = sum(state.nbytes for layer in layers for state in (layer.keys, layer.values))
    coded = [layer.columns for layer in cache.layers if isinstance(layer, ColumnLayer)]
    allocated += sum(tensor.nbytes for columns in coded for column in columns for tensor in column.tensors())
    assert allocated == read_plan(config, 21, "float32", batch=3).stored_bytes
    assert len(coded) == (0 if method.bits is None else 6)


def test_gradients_pass_codes():
    """Rounding counts as the identity: gradients are those of the latent divided by scale and step."""
    latents = torch.randn(1, 3, 16, dtype=torch.float64, requires_grad=True)
    codes = coded(latents, (4, 1))
    codes[..., :-1].sum().backward()
    scales = codes[..., -1:].detach()
    expected = torch.cat([1 / (scales * STEPS[bits]).expand(-1, -1, UNIT) for bits in (4, 1)], -1)
    assert torch.allclose(latents.grad, expected)


REFUSED = {
    "rank must be above 0 and at most 1": (KVLatents(rank=1.5), {}),
    "in rising order": (KVLatents(groups=((2, 1),)), {}),
    "name each layer once": (KVLatents(groups=((1, 2), (2, 3))), {}),
    "an entry for each of the 6 layers": (KVLatents(bits=BITS[:5]), {}),
    "falling numbers from 8 to 0": (KVLatents(bits=((1, 2, 0, 0), *BITS[1:])), {}),
    "so bits must have 2 entries": (KVLatents(bits=BITS), {"num_key_value_heads": 1}),
    "bits replace rank": (KVLatents(rank=0.3, bits=BITS), {}),
    "cannot cache a latent": (KVLatents(), {"sliding_window": 4}),
    "kv_latents with resformer": ([KVLatents(), "resformer"], {}),
    "cla both change its keys or values": ([KVLatents(groups=()), "cla"], {}),
    "has no keys of its own": ([KVLatents(), {"name": "drop", "attention": (2,)}], {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    methods, shape = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        config_of(methods, **shape)


def test_dropped_attention_beside_latents():
    """A layer without attention has no latent; the layer above reads the one below it, if the group says so."""
    config = config_of([KVLatents(groups=((0, 1, 3, 4, 5),)), {"name": "drop", "attention": (2,)}])
    assert config.plan.latents[2] is None and config.plan.keys[3] == (1, 3)
    model, ids = build(config), tokens(length=6)
    with torch.no_grad():
        assert torch.allclose(steps(model, ids, [4, 2])[0], model(ids).logits)


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_other_engines_are_refused(engine):
    with pytest.raises(ValueError, match="not defined for latents"):
        read_plan(config_of(KVLatents()), 16, "float16", engine=engine)


def test_continuous_batching_is_refused():
    model = build(config_of(KVLatents()))
    with pytest.raises(ValueError, match="continuous batching stores keys and values"):
        model(tokens(length=4), **{CACHE: object()})


def test_verify_checks_codes_in_float64():
    """In float32 the order of sums decides between neighbouring codes."""
    verification = verify(build(config_of(KVLatents(bits=BITS), max_position_embeddings=256)).float())
    assert {check.dtype for check in verification.checks if check.status == "PASS"} == {"float64"}
    assert not [check for check in verification.checks if check.status == "FAIL"]

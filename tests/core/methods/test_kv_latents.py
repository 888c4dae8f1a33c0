"""Latents: the codes in the cache, gradients, and what is refused. Their equation: test_equations.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from crosslayer import verify
from crosslayer.core.columns import ColumnLayer
from crosslayer.core.latents import SCALE, STEPS, UNIT, CodedColumns, coded
from crosslayer.core.methods.kv_latents import KVLatents
from crosslayer.core.sixteen_bits import allocated_tokens
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing.tiny import build, config_of, steps, tokens
from crosslayer.wiring.read import read_plan
from tests.helpers.verifications import only

BITS = ((4, 2, 1, 0), (8, 2, 0, 0), (3, 1, 1, 1), (7, 6, 5, 0), (2, 2, 2, 2), (1, 0, 0, 0))


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
    rows = allocated_tokens(length)
    assert allocated == rows
    assert sum(tensor.nbytes for tensor in layer.columns[0].tensors()) == 2 * rows * (sum(bits) + SCALE)


@pytest.mark.parametrize("tokens", [0, 1, 12])
@pytest.mark.parametrize("argument", [-30, -13, -12, -11, -5, -1, 0, 1, 5, 12, 30])
def test_codes_are_cropped_as_transformers_crops_states(argument, tokens):
    latents = torch.randn(2, tokens, UNIT)
    stored = coded(latents, [8])[:, None]  # (B, 1, T, R + 1)
    ours, own = ColumnLayer(lambda: CodedColumns([8]), exact=True), DynamicLayer()
    own.update(stored, stored[..., :0])  # an empty layer of transformers 5.19 cannot be cropped
    if tokens:
        ours.update(stored, stored[..., :0])
    try:
        own.crop(argument)
    except ValueError:
        with pytest.raises(ValueError):
            ours.crop(argument)
        assert ours.get_seq_length() == tokens
        return
    ours.crop(argument)
    assert ours.get_seq_length() == own.get_seq_length()
    assert ours.get_mask_sizes(1) == own.get_mask_sizes(1)
    if own.get_seq_length():
        more = [layer.update(stored[:, :, :1], stored[:, :, :1, :0])[0] for layer in (ours, own)]
        assert torch.equal(*more)


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
    with pytest.raises(ValueError, match=f"kv_latents: layers cache latents, which {engine} does not do"):
        read_plan(config_of(KVLatents()), 16, "float16", engine=engine)


def test_continuous_batching_is_refused():
    model = build(config_of(KVLatents()))
    with pytest.raises(ValueError, match="continuous batching is not defined"):
        model(tokens(length=4), **{CACHE: object()})


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float32",), ("bfloat16", "float64")])
def test_verify_checks_codes_in_float64(dtypes, monkeypatch):
    """In float32 the order of sums decides between neighbouring codes; every row says so, whatever was asked for."""
    if dtypes != ("float32", "bfloat16"):
        only(monkeypatch, "cache, token by token", "cache, uneven chunks", "left-padded batch")
    verification = verify(build(config_of(KVLatents(bits=BITS), max_position_embeddings=256)).float(), dtypes=dtypes)
    checked = [check for check in verification.checks if check.status == "PASS"]
    assert {check.dtype for check in checked} == {"float64"} and not verification.failed
    assert len([check for check in checked if "neighboring codes" in check.reason]) == 3

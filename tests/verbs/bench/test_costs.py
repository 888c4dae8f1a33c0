"""Costs against hand counts, and against torch's own counter of FLOPs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import crosslayer
from crosslayer.testing import SHAPE, config_of
from crosslayer.testing.tiny import build
from crosslayer.verbs.bench.costs import Attention, structure
from tests.helpers.benches import BYTES, DROP, LAYER, MLP, OUT, STATE, UNIATTN, K, Q, V
from tests.helpers.tiny import VOCABULARY, tiny, tokens


def test_shape_is_what_the_hand_counts_assume():
    assert (SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_key_value_heads"]) == (32, 48, 2)


def test_costs_of_a_stock_llama_by_hand():
    model = structure(tiny("llama"))
    assert model.matrices == 3 * LAYER and model.head == VOCABULARY * 32 and model.shape == (48, 32)
    assert model.attention == (Attention(4, 2, 8, 8),) * 3 and model.itemsize == BYTES
    pairs = 10 * 11 // 2
    assert model.prefill_flops(2, 10) == (2 * 3 * LAYER * 20, 2 * 3 * pairs * 4 * (2 * 8 + 2 * 8))
    assert model.weight_bytes() == (3 * LAYER + VOCABULARY * 32) * BYTES
    assert model.state_bytes(2, 12) == model.cache_bytes(2, 12) == 2 * 12 * 3 * 2 * STATE * BYTES
    assert model.copied_bytes(2, 12) == 2 * model.cache_bytes(2, 12)


@pytest.mark.parametrize(
    ("methods", "matrices", "stored", "attending"),
    [
        ([], 6 * LAYER, 12, 6),
        (UNIATTN, 6 * LAYER - 2 * (Q + K) + 2 * 32 * 32, 10, 6),
        ([{"name": "cla", "group": 2}], 6 * LAYER - 3 * (K + V), 6, 6),
        ([{"name": "svformer"}], 6 * LAYER - 5 * V, 7, 6),
        (DROP, 6 * LAYER - 2 * (Q + K + V + OUT) - MLP, 8, 4),
    ],
)
def test_costs_of_our_plans_by_hand(methods, matrices, stored, attending):
    config = config_of(methods)
    model = structure(build(config))
    assert model.matrices == matrices and model.head == VOCABULARY * 32
    assert model.cache_bytes(3, 7) == 3 * 7 * stored * STATE * BYTES
    assert model.state_bytes(3, 7) == 3 * 7 * attending * 2 * STATE * BYTES  # what is borrowed is read again
    assert model.prefill_flops(1, 5)[1] == attending * 15 * 4 * 32
    assert config.plan.bytes_per_token(STATE * BYTES) == (model.cache_bytes(1, 1), model.state_bytes(1, 1))


@pytest.mark.parametrize(
    ("name", "matrices", "stored", "read"),
    [
        ("fusedkv", 6 * LAYER - 3 * (K + V), 6, 6 + 3 * 4),  # its weights of channels are no matrices
        ("skipv1", 6 * LAYER - 5 * V // 2, 6 + 3.5, 12),
        ("cross_attention", 6 * LAYER, 12, 2 + 5 * 4),
        ("value_embeddings", 6 * LAYER, 12, 12),  # of its tables a token reads a row
    ],
)
def test_costs_of_plans_with_several_sources_by_hand(name, matrices, stored, read):
    config = config_of([name])
    model = structure(build(config))
    assert model.matrices == matrices
    assert model.cache_bytes(3, 7) == 3 * 7 * stored * STATE * BYTES
    assert model.state_bytes(3, 7) == 3 * 7 * read * STATE * BYTES
    assert 2 * crosslayer.plan(config, length=7, dtype="float32").read_bytes == model.state_bytes(1, 7)  # of float64
    assert config.plan.bytes_per_token(STATE * BYTES) == (model.cache_bytes(1, 1), model.state_bytes(1, 1))


@pytest.mark.parametrize("tokens", [0.25, 10])
def test_costs_of_chosen_tokens_by_hand(tokens):
    """Of 40 tokens, two readers read 10, a sparse chooser all keys and 10 values; three layers read all."""
    method = {
        "name": "shared_choice",
        "groups": ((1, 2), (3, 4)),
        "sparse_choosers": (3,),
        "tokens": tokens,
        "sinks": 1,
        "least": 0,
    }
    config = config_of([{**method, "window": 2}])
    model = structure(build(config))
    assert model.cache_bytes(3, 40) == 3 * 40 * 12 * STATE * BYTES
    assert model.state_bytes(3, 40) == 3 * (3 * 80 + 2 * 20 + 50) * STATE * BYTES
    assert config.plan.read_states(40) * 40 == 3 * 80 + 2 * 20 + 50


def test_windows_bound_what_is_read_and_kept():
    layer = Attention(4, 2, 8, 6, window=5, stored=(0.0, 1.0))
    assert layer.read(9) == 5 * 2 * 14 and layer.read(3) == 3 * 2 * 14
    assert layer.kept(9) == 5 * 2 * 6
    assert layer.flops(4) == 2 * 10 * 4 * 14 and layer.flops(6) == 2 * 36 * 4 * 14


def counted(model, ids):
    """Return FLOPs by operator of a prompt (B, T) of which the last logits are wanted."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(ids, use_cache=False, logits_to_keep=1)
    return counter.get_flop_counts()["Global"]


@pytest.mark.parametrize(
    "methods",
    [None, UNIATTN, [{"name": "cla", "group": 2}], [{"name": "svformer"}], DROP, ["fusedkv"], ["cross_attention"]],
    ids=str,
)
def test_flops_are_those_that_torch_counts(methods):
    model, ids = tiny("llama") if methods is None else build(config_of(methods)), tokens(batch=2, length=10)
    model.set_attn_implementation("eager")  # torch's counter does not know the CPU's SDPA, and products are products
    costs, flops = structure(model), counted(model, ids)
    matrices, attention = costs.prefill_flops(2, 10, eager=True)  # two layers of UNIATTN take a third one's maps
    assert flops[torch.ops.aten.mm] == matrices + 2 * costs.head * 2
    # eager attention computes every pair, of which a causal kernel needs those on and below the diagonal
    assert flops[torch.ops.aten.bmm] * (10 + 1) / (2 * 10) == attention


def test_flops_of_a_window_that_cuts_are_those_of_every_pair():
    model = tiny("mistral", "eager")
    assert counted(model, tokens(batch=2, length=10))[torch.ops.aten.bmm] == structure(model).prefill_flops(2, 10)[1]

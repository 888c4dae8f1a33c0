"""What plans say that a step reads and a cache holds, against hand counts."""

import pytest
import torch

from crosslayer.judge import clock
from crosslayer.judge.clock import Load, read_plans
from crosslayer.testing import SHAPE, config_of
from crosslayer.testing.tiny import build
from crosslayer.verbs.bench.result import TOO_FEW
from tests.helpers.benches import BYTES, DROP, STATE, UNIATTN, short
from tests.helpers.tiny import tiny


def planned(model, batch, length):
    """Return the bytes that are stored and read after `length` tokens, including the last, which is new."""
    plan = read_plans([model], Load(length - 1, batch, 1))[0]
    return plan.stored_bytes, plan.read_bytes


def test_a_stock_llama_by_hand():
    assert SHAPE["num_key_value_heads"] == 2
    assert planned(tiny("llama"), 2, 12) == (2 * 12 * 3 * 2 * STATE * BYTES,) * 2


@pytest.mark.parametrize(
    ("methods", "stored", "read"),
    [
        ([], 12, 12),
        (UNIATTN, 10, 12),
        ([{"name": "cla", "group": 2}], 6, 12),  # what is borrowed is read again
        ([{"name": "svformer"}], 7, 12),
        (DROP, 8, 8),
        (["fusedkv"], 6, 6 + 3 * 4),
        (["cross_attention"], 12, 2 + 5 * 4),
    ],
    ids=str,
)
def test_our_plans_by_hand(methods, stored, read):
    config = config_of(methods)
    unit = 3 * 7 * STATE * BYTES
    assert planned(build(config), 3, 7) == (unit * stored, unit * read)
    assert config.plan.bytes_per_token(STATE * BYTES) == (STATE * BYTES * stored, STATE * BYTES * read)


@pytest.mark.parametrize("tokens", [0.25, 10])
def test_chosen_tokens_by_hand(tokens):
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
    states = 3 * 80 + 2 * 20 + 50
    assert planned(build(config), 3, 40) == (3 * 40 * 12 * STATE * BYTES, 3 * states * STATE * BYTES)
    assert config.plan.read_states(40) * 40 == states


def test_windows_bound_what_is_read():
    assert planned(tiny("mistral"), 1, 40)[1] == 3 * 8 * 2 * STATE * BYTES


def test_experts_are_read_like_all_else_and_one_pair_has_no_interval():
    model = tiny("mixtral", dtype=torch.float32)
    benchmark = short(model, model, 4)
    (cache,), (reads,) = benchmark.rows_of("bytes"), benchmark.rows_of("reads of a step")
    assert cache.change.value == 1 and reads.value == reads.original == 3 * 5 * 2 * STATE * 2
    assert reads.details["stored"] == 2 * reads.value  # in float32
    assert all(row.change.interval is None for row in benchmark.rows if row.unit == "s")
    assert sum(TOO_FEW in sentence for sentence in benchmark.sentences()) == 1


def test_a_model_without_a_plan_is_measured_all_the_same(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no plan")

    monkeypatch.setattr(clock, "model_plan", refuse)
    benchmark = short(tiny("llama"), tiny("llama"), 4)
    assert not benchmark.rows_of("reads of a step") and benchmark.rows_of("bytes")[0].change.value == 1

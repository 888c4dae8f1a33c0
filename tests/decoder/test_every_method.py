"""The contract, over every file in `methods/`, over compositions, and over a method of the user's own."""

import sys
import textwrap

import pytest
import torch

from crosslayer import methods
from crosslayer import testing as contract
from crosslayer.methods import method_class, method_names, to_entry
from tests.helpers.tiny import tokens

BLOCKS = ((2, 3), (4, 5))
SINGLE = {name: [to_entry(method_class(name).example(6))] for name in method_names()}
VARIANTS = {
    "llama": [],
    "uniattn, two blocks": [{"name": "uniattn", "superblocks": BLOCKS}],
    "drop of all kinds": [{"name": "drop", "attention": (0, 3), "mlp": (2,), "layers": (4,)}],
    "resformer identity": [{"name": "resformer", "mode": "identity"}],
    "resformer sparse": [{"name": "resformer", "mode": "sparse"}],
    "resformer dense": [{"name": "resformer", "mode": "dense", "source": "all"}],
    "resformer all": [{"name": "resformer", "mode": "constant", "source": "all"}],
    "resformer previous queries": [{"name": "resformer", "of": "queries", "source": "previous"}],
    "resformer keys": [{"name": "resformer", "of": "keys"}],
    "svformer anchors": [{"name": "svformer", "anchors": (0, 3)}],
    "svformer keys": [{"name": "svformer", "share": "keys"}],
    "svformer all, every two": [{"name": "svformer", "share": ("queries", "keys", "values"), "every": 2}],
    "cla of 4 in the top": [{"name": "cla", "group": 4, "start": 1, "end": 6}],
    "uniattn heads": [{"name": "uniattn", "superblocks": BLOCKS, "compensation": "heads"}],
    "uniattn mlp": [{"name": "uniattn", "superblocks": BLOCKS, "compensation": "mlp"}],
    "uniattn none": [{"name": "uniattn", "superblocks": BLOCKS, "compensation": None}],
    "cla groups, compensated": [{"name": "cla", "groups": ((1, 2, 3), (4, 5)), "compensation": "attention"}],
    "svformer compensated": [{"name": "svformer", "anchors": (0, 3), "compensation": "heads"}],
    "drop compensated": [{"name": "drop", "attention": (0, 3), "compensation": "attention"}],
    "attnres blocks": [{"name": "attnres", "block": 5}],
    "kvsharer, a lender of three": [{"name": "kvsharer", "pairs": ((5, 1), (2, 1), (4, 0), (3, 1))}],
    "kvsharer heads, bias": [
        {"name": "kvsharer", "pairs": ((5, 1), (4, 0)), "compensation": "heads", "compensation_bias": True}
    ],
    "uniattn mlp, bias": [{"name": "uniattn", "superblocks": BLOCKS, "compensation": "mlp", "compensation_bias": True}],
    "drop, bias": [{"name": "drop", "attention": (0, 3), "compensation": "attention", "compensation_bias": True}],
}
COMPOSITIONS = {
    "attnres + svformer": ["attnres", "svformer"],
    "attnres + resformer": ["attnres", "resformer"],
    "resformer + cla": ["resformer", "cla"],
    "uniattn + drop of followers": [{"name": "uniattn", "superblocks": BLOCKS}, {"name": "drop", "attention": (3,)}],
    "kvsharer + drop of a reader": [
        {"name": "kvsharer", "pairs": ((4, 1), (5, 2))},
        {"name": "drop", "attention": (4,)},
    ],
    "uniattn + resformer": [{"name": "uniattn", "superblocks": BLOCKS}, "resformer"],
    "attnres + drop compensated": ["attnres", {"name": "drop", "attention": (2,), "compensation": "attention"}],
    "attnres + cla": [{"name": "attnres", "block": 3}, "cla"],
    "attnres + drop": ["attnres", {"name": "drop", "attention": (0,), "mlp": (5,)}],
    "svformer + uniattn": ["svformer", {"name": "uniattn", "superblocks": BLOCKS}],
    "resformer + uniattn + attnres": ["resformer", {"name": "uniattn", "superblocks": BLOCKS}, "attnres"],
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 4}
SHAPES = {
    "cla, sliding windows": (["cla"], SLIDING),
    "uniattn, sliding windows": ([{"name": "uniattn", "superblocks": BLOCKS}], SLIDING),
    "svformer, MQA, qk-norm": (["svformer"], {"num_key_value_heads": 1, "qk_norm": True}),
    "resformer, biases, tied": (["resformer"], {"attention_bias": True, "tie_word_embeddings": True}),
}
CASES = {
    **{name: (methods, {}) for group in (SINGLE, VARIANTS, COMPOSITIONS) for name, methods in group.items()},
    **SHAPES,
}


@pytest.mark.parametrize("check", contract.BY_OPTIONS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES)
def test_contract(case, check):
    methods, changes = CASES[case]
    check(contract.config_of(methods, **changes))


@pytest.mark.parametrize("check", contract.BY_METHOD, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SINGLE)
def test_contract_of_the_method(name, check):
    check(contract.config_of(SINGLE[name]))


COMPILED = {
    "resformer + uniattn": ["resformer", {"name": "uniattn", "superblocks": ((1, 2),)}],
    "attnres + svformer": ["attnres", "svformer"],
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled(case):
    contract.compiled_equals_eager(contract.config_of(COMPILED[case], num_hidden_layers=3))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SINGLE, *COMPOSITIONS])
def test_every_case_compiles_without_a_graph_break(case):
    contract.compiled_equals_eager(contract.config_of(CASES[case][0]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, on first use
@pytest.mark.parametrize("case", ["cla", "resformer", "attnres"])
def test_inductor(case):
    contract.compiled_equals_eager(contract.config_of(CASES[case][0]), backend="inductor")


@pytest.mark.slow  # the first call compiles the kernel
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's and transformers' own calls
@pytest.mark.parametrize("case", ["cla", "svformer", "attnres", "uniattn, sliding windows"])
def test_flex_attention_equals_sdpa(case):
    methods, changes = CASES[case]
    model, ids = contract.build(contract.config_of(methods, **changes)).float(), tokens(length=12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        model.set_attn_implementation("flex_attention")
        found = model(ids, attention_mask=mask, use_cache=False).logits
    # float32 sums of 12 terms in another order, on logits up to about 10
    assert (expected - found)[mask.bool()].abs().max() < 1e-4


OWN = '''
"""Scaled values: a user's own method.

    V'_n = s V_n

Flows: nothing. Reads: nothing. Cache: unchanged. Source: this test.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init

from crosslayer.method import HeadMixer, Method


@dataclass(frozen=True)
class Scaled(Method):
    """Values times a trained number that begins at `by`."""

    by: float = 2.0

    def heads(self, config, wiring, layer):
        return Scale(self.by) if wiring.plan.values[layer] == layer else None


class Scale(HeadMixer):
    def __init__(self, by):
        super().__init__()
        self.by, self.factor = by, nn.Parameter(torch.tensor(by))

    def reset(self):
        init.constant_(self.factor, self.by)

    def before(self, q, k, v, carry):
        return q, k, v * self.factor, carry
'''


@pytest.fixture
def own_method(tmp_path, monkeypatch):
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "__init__.py").write_text("")
    (tmp_path / "my_methods" / "scaled.py").write_text(textwrap.dedent(OWN).lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(methods, "_allowed", {"my_methods"})
    yield {"name": "my_methods.scaled", "by": 0.5}
    for name in [n for n in sys.modules if n.startswith("my_methods")]:
        del sys.modules[name]


def test_a_method_of_the_users_own(own_method):
    for entries in ([own_method], [own_method, "cla"], ["attnres", own_method]):
        contract.check_method(entries)

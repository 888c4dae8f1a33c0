"""The contract, over every method, over compositions, and over a method of the user's own."""

import sys
import textwrap

import pytest

from crosslayer import testing as contract
from crosslayer.core import methods
from tests.helpers.cases import CASES, COMPOSITIONS, SINGLE, each
from tests.helpers.daily import daily

# These checks take a third of the contract's time. The fast tests run them on `KINDS`, the slow tests on every method.
COSTLY = (
    contract.quantized_cache_cuts_make_no_difference,
    contract.generation_modes_agree,
    contract.beam_search_equals_uncached,
)
KINDS = (
    "cla",
    "svformer",
    "drop",
    "yoco",
    "attnres",
    "cross_attention",
    "shared_choice",
    "attnres, linear attention",
)
CONTRACT = [
    pytest.param(
        *case.values,
        check,
        marks=[*case.marks, *([pytest.mark.slow] if check in COSTLY and case.values[0] not in KINDS else [])],
        id=f"{case.values[0]}-{check.__name__}",
    )
    for case in each(CASES)
    for check in contract.BY_OPTIONS
]


@pytest.mark.parametrize(("case", "check"), CONTRACT)
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


@pytest.mark.parametrize("case", daily(COMPILED, "attnres + svformer"))
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


def test_flex_attention_is_refused():
    with pytest.raises(ValueError, match="flex_attention"):
        contract.build(contract.config_of([])).set_attn_implementation("flex_attention")


OWN = '''
"""Scaled values: a user's own method.

    V'_n = s V_n

Flows: nothing. Reads: nothing. Cache: unchanged. Source: this test.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init

from crosslayer.core.method import HeadMixer, Method


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


@pytest.mark.parametrize("others", daily([((), ()), ((), ("cla",)), (("attnres",), ())], (("attnres",), ())), ids=str)
def test_a_method_of_the_users_own(own_method, others):
    before, after = others
    contract.check_method([*before, own_method, *after])

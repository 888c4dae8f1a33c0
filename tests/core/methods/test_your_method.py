"""What docs/methods/your_own.md tells authors works as it stands there: outside of the package, and as a file in it."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import crosslayer
from crosslayer.core import methods
from crosslayer.core.method import Compensated, Method
from crosslayer.testing import CHECKS, cached_equals_full, causal, combines_with_shared_states, config_of

ROOT = Path(__file__).parents[3]
WORDS = ("Scaled values: groups", "U_n = A_n (s V_l)", "by: float = 2.0", "Where the trained number begins.",
         "KV cache: 75.00%", "KV bytes per token in bf16")  # fmt: skip


MIXED = """
from dataclasses import dataclass
from crosslayer.core.method import Method
from scaled import Below

@dataclass(frozen=True)
class Mixed(Method):
    def heads(self, config, wiring, layer):
        return Below()
"""


def blocks(heading: str) -> list[str]:
    """The blocks of code below a heading of the page."""
    section = (
        (ROOT / "docs" / "methods" / "your_own.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    )
    return re.findall(r"```python\n(.+?)```", section, re.S)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's method as a module on the path, and the page's test of it."""
    (tmp_path / "scaled.py").write_text("\n".join(blocks("Step by step")))
    (tmp_path / "test_scaled.py").write_text("\n".join(blocks("Test it")))
    (tmp_path / "use.py").write_text("\n".join(blocks("Use it")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(methods, "_allowed", set())
    yield tmp_path
    sys.modules.pop("scaled", None)


def test_it_is_described(folder):
    with pytest.raises(ValueError, match="'scaled'.*--allow-methods"):
        crosslayer.methods("scaled")
    methods.allow_methods("scaled")
    (shown,) = crosslayer.methods("scaled").sentences()
    assert all(word in shown for word in WORDS), shown


def test_the_mixer_that_hands_something_on_passes_the_contract(folder):
    (folder / "mixed.py").write_text(MIXED)
    methods.allow_methods("mixed")
    for check in (cached_equals_full, causal, combines_with_shared_states):
        check(config_of("mixed"))


def test_the_class_may_be_named_as_in_python(folder):
    with pytest.raises(ValueError, match="'Scaled'.*--allow-methods"):
        methods.method_class("Scaled")
    methods.allow_methods("scaled")
    for name in ("Scaled", "scaled.Scaled", "scaled"):
        assert methods.method_class(name).name() == "scaled"
    for name in ("Compensated", "Scale", "Other", "other.Scaled"):  # imported, no method, not there, elsewhere
        with pytest.raises(ValueError, match="not known"):
            methods.method_class(name)


def test_a_module_that_cannot_be_imported_is_named(folder):
    methods.allow_methods("missing_one")
    for name in ("missing_one", "Missing"):
        with pytest.raises(ValueError, match="missing_one.*PYTHONPATH"):
            methods.method_class(name)


HEAD = """
from dataclasses import dataclass

from crosslayer.core.method import Method


@dataclass(frozen=True)
class {name}(Method):
{body}
"""
SPARSE = {  # methods that describe themselves less than the contract demands: the body of the class, the first line
    "in_the_class": ('    """Every layer."""\n\n    start: int = 2\n', "Every layer"),
    "in_lines": (
        '    """\n    Every layer.\n\n    More of it.\n    """\n\n    start: int = 2\n    ...\n',
        "Every layer",
    ),
    "empty": ('    """"""\n\n    start: int = 2\n    """"""\n', "Empty(start: int = 2)"),
    "undescribed": ("    start: int = 2\n", "Undescribed(start: int = 2)"),
}


@pytest.mark.parametrize("name", SPARSE)
def test_a_method_that_describes_itself_sparsely_is_listed_and_described(name, tmp_path, monkeypatch):
    body, first = SPARSE[name]
    (tmp_path / f"{name}.py").write_text(HEAD.format(name=name.capitalize(), body=body))
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    methods._files.cache_clear()
    try:
        (row,) = [row for row in crosslayer.methods().rows if row["method"] == name]
        (shown,) = crosslayer.methods(name).sentences()
    finally:
        sys.modules.pop(f"{methods.__name__}.{name}", None)
        methods._files.cache_clear()
    assert row["what"] == first and row["source"] == ""
    lines = shown.split("\n")
    assert lines[0].startswith(first) and shown.count(first) == 1
    assert not lines[lines.index("  start: int = 2") + 1] and "\n\n\n" not in shown


def test_it_is_used(folder, capsys):
    runpy.run_path(str(folder / "use.py"))
    assert "KV cache: 87.50%" in capsys.readouterr().out  # the default groups its first two layers


def test_a_whole_number_for_a_fraction_is_that_fraction(folder):
    methods.allow_methods("scaled")
    for value in (1, 1.0):
        (method,) = config_of({"name": "scaled", "by": value}).methods
        assert repr(method.by) == "1.0"
    for value in (float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match="finite number"):
            config_of({"name": "scaled", "by": value})


@dataclass(frozen=True, kw_only=True)
class OwnCheck(Compensated):
    """A method whose own check hides that of its base class."""

    def __post_init__(self):
        pass


@dataclass(frozen=True)
class WithoutBase(Method):
    """A method that says where a W_c may write, and is no subclass of `Compensated`."""

    targets = ("attention",)


def test_w_c_is_checked_and_never_left_out_silently():
    with pytest.raises(ValueError, match="compensation.*one.*'head'"):
        methods.wire([OwnCheck(compensation="head")], 4)
    with pytest.raises(ValueError, match="of Compensated"):
        methods.wire([WithoutBase()], 4)


def test_a_config_of_an_earlier_release_may_name_an_option_that_is_off():
    assert methods.load_method({"name": "cla", "compensation_bias": False}) == methods.load_method("cla")
    assert methods.load_method({"name": "svformer", "compensation": None}) == methods.load_method("svformer")
    with pytest.raises(ValueError, match="'cla' has no option 'compensation_bias'"):
        methods.load_method({"name": "cla", "compensation_bias": True})


def test_its_test_passes(folder):
    test = runpy.run_path(str(folder / "test_scaled.py"))
    for check in CHECKS:
        test["test_scaled"](check)
    test["test_scaled_with_others"]()


ADDED = """
import sys

import torch

import crosslayer.cli
import crosslayer.core.methods
from crosslayer import testing as contract
from crosslayer.verbs.methods.run import methods
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.verbs.retrofit.run import options_of
from crosslayer.verbs.retrofit.search import searched_methods
from crosslayer.verbs.retrofit.run import strategy_of
from crosslayer.core.decoder.convert import from_model, to_model
from transformers import ArceeConfig, ArceeForCausalLM, LlamaConfig, LlamaForCausalLM

assert crosslayer.__file__.startswith(FOLDER), crosslayer.__file__
cls = crosslayer.core.methods.method_class("scaled")
contract.check_method(cls.example(6))
assert "scaled" in crosslayer.core.methods.method_names()
(row,) = [row for row in methods().rows if row["method"] == "scaled"]
assert row["what"].startswith("Scaled values: groups use")
assert cls in searched_methods()
strategy = strategy_of(options_of(method="scaled", layers="2-3"))
assert strategy.method is cls
(method,) = strategy.compensated([strategy.on([[2, 3]], 6)])
assert method.compensation == "attention"
shape = {**contract.SHAPE, "num_hidden_layers": 6}
result = convert_weights(LlamaForCausalLM(LlamaConfig(**shape)).eval(), [method])
assert "model.layers.3.self_attn.v_proj.weight" in result.weights.dropped, result.weights.dropped
assert "model.layers.3.attn_compensation.weight" in result.weights.new, result.weights.new

built = contract.build(contract.config_of(["cla"], family="toy", hidden_act="relu2"))
assert built(contract.tokens()).logits.isfinite().all() and not hasattr(built.model.layers[0].mlp, "gate_proj")
source = ArceeForCausalLM(ArceeConfig(**shape, head_dim=8)).double().eval()
ours, ids = to_model(source), contract.tokens()
with torch.no_grad():
    assert torch.equal(source(ids).logits, ours(ids).logits)
    assert torch.equal(from_model(ours, "arcee")(ids).logits, ours(ids).logits)
assert convert_weights(source, [method]).model.config.family == "toy"

sys.argv = ["crosslayer", "methods"]
crosslayer.cli.main()
"""
FAMILY = '''
"""Arcee: Llama with an MLP without a gate."""

from crosslayer.core.decoder.families import PLAIN_MLP, Family, ModelType, PlainMLP

FAMILY = Family(
    mlp=PlainMLP, mlp_split=PLAIN_MLP, experts=False, model_types={"arcee": ModelType(("attention_bias", "mlp_bias"))}
)
'''


@pytest.mark.slow  # a process of its own
def test_a_file_is_all_that_a_method_or_a_family_needs(tmp_path):
    """A copy of the package with two new files.

    Of the method the contract, the tables, a retrofit, the search and the command line know; of the family a model is
    built, and a model type that did not convert does.
    """
    shutil.copytree(ROOT / "crosslayer", tmp_path / "crosslayer", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "crosslayer" / "core" / "methods" / "scaled.py").write_text("\n".join(blocks("Step by step")))
    (tmp_path / "crosslayer" / "core" / "decoder" / "families" / "toy.py").write_text(FAMILY)
    (tmp_path / "added.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{ADDED}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "added.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "scaled" in done.stdout

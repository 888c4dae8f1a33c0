"""Methods of a user's own: how a config may name them, and that a config's word alone never runs code."""

import dataclasses
import json
import sys
import textwrap
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import crosslayer
from crosslayer import CrossLayerConfig
from crosslayer import testing as contract
from crosslayer.core import methods
from crosslayer.core.methods.cla import CLA
from tests.helpers.nested import Nested

OWN = '''
"""Halves: a user's own method.

Flows: keys. Reads: every second layer. Cache: half of the keys. Source: this test.
"""

from dataclasses import dataclass

from crosslayer.core.methods.cla import CLA


@dataclass(frozen=True)
class Halves(CLA):
    """CLA by another name."""

'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path, as the working directory is in a console, with modules that leave a trace when imported."""
    trace = "import pathlib\npathlib.Path(__file__).with_name('trace').touch()\n"
    for package in ("mine", "evil"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "mine" / "halves.py").write_text(textwrap.dedent(OWN).lstrip())
    (tmp_path / "halves.py").write_text(textwrap.dedent(OWN).lstrip())
    (tmp_path / "evil" / "__init__.py").write_text(trace)
    (tmp_path / "evil" / "run.py").write_text(trace)
    (tmp_path / "evil.py").write_text(trace)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(methods, "_allowed", set())
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ("mine", "evil", "halves")]:
        del sys.modules[name]


NAMES = ["evil.run", "evil", "evil.run.deeper", "os.path", "os", "crosslayer.cli", "crosslayer.core.method", "..evil",
         "evil.run\n", "__main__", "this", "crosslayer.core.methods.evil", "antigravity", ""]  # fmt: skip
LOADERS = [
    AutoConfig.from_pretrained,
    CrossLayerConfig.from_pretrained,
    AutoModel.from_pretrained,
    AutoModelForCausalLM.from_pretrained,
    lambda folder: CrossLayerConfig.from_dict(json.loads((folder / "config.json").read_text())),
    lambda folder: CrossLayerConfig(cross_layer=json.loads((folder / "config.json").read_text())["cross_layer"]),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_config_never_runs_code(folder, name, monkeypatch):
    imported = []
    fake = SimpleNamespace(import_module=lambda path: imported.append(path))
    for entry in (name, {"name": name}):
        values = CrossLayerConfig(**contract.SHAPE).to_dict() | {"cross_layer": [entry]}
        (folder / "config.json").write_text(json.dumps(values))
        monkeypatch.setattr(methods, "importlib", fake)
        for load in LOADERS:
            with pytest.raises(ValueError, match="not known|must define .* got 0") as caught:
                load(folder)
            assert "\n" not in str(caught.value)
        monkeypatch.undo()
        assert imported == [] and not list(folder.rglob("trace"))


def test_the_error_names_both_ways_out(folder):
    with pytest.raises(ValueError, match=r"imported .* crosslayer.allow_methods\('evil.run'\).* --allow-methods evil"):
        contract.config_of(["evil.run"])
    with pytest.raises(ValueError, match="did.*mean 'cla'"):
        contract.config_of(["clo"])


@pytest.mark.parametrize("name", ["mine.halves", "halves"])
def test_a_module_that_is_imported_can_be_named(folder, name):
    __import__(name)
    config = contract.config_of([{"name": name, "group": 3}])
    assert config.plan == CLA(group=3).plan(6)
    assert CrossLayerConfig.from_dict(config.to_dict()).plan == config.plan
    cls = type(config.methods[0])
    for given in (cls, cls(), [cls], (cls(),)):
        assert CrossLayerConfig(**contract.SHAPE, cross_layer=given).methods == [cls()]


@pytest.mark.parametrize(("allowed", "name"), [("mine", "mine.halves"), ("mine.halves",) * 2, ("halves",) * 2])
def test_a_module_that_is_allowed_can_be_named(folder, allowed, name):
    crosslayer.allow_methods(allowed)
    assert contract.config_of([name]).plan == CLA().plan(6)


def test_what_is_allowed_is_no_prefix_of_letters(folder):
    crosslayer.allow_methods("evi", "mine.halve")
    for name in ("evil", "mine.halves"):
        with pytest.raises(ValueError, match="not known"):
            contract.config_of([name])
    with pytest.raises(ValueError, match="'mine/halves'"):
        crosslayer.allow_methods("mine/halves")
    crosslayer.allow_methods("missing")
    with pytest.raises(ValueError, match="'missing.method'"):
        contract.config_of(["missing.method"])


def test_a_method_with_modules_inside_of_its_modules_passes_the_contract():
    contract.check_method(Nested)


def test_a_method_that_is_no_dataclass_is_refused(folder):
    (folder / "mine" / "bare.py").write_text("from crosslayer.core.method import Method\nclass Bare(Method): pass\n")
    crosslayer.allow_methods("mine")
    with pytest.raises(ValueError, match="must define .* got 0"):
        contract.config_of(["mine.bare"])


def test_the_name_of_a_packaged_method_may_be_written_in_full():
    assert contract.config_of(["crosslayer.core.methods.cla"]).methods == [CLA()]
    assert methods.method_class("cla") is CLA and dataclasses.is_dataclass(CLA)

"""Every package that the code imports is declared, and nothing is imported before it is needed."""

import ast
import json
import pickle
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import crosslayer

ROOT = Path(__file__).parent.parent
OPTIONAL = {
    "accelerate",
    "datasets",
    "pcodec",
    "fsspec",
    "gguf",
    "lm_eval",
    "peft",
    "vllm",
    "pyarrow",
    "tqdm",
    "triton",
}  # imported where they are used, named in the error otherwise
HEAVY = ("torch", "transformers", "numpy")


def imported_packages() -> set[str]:
    names = set()
    for path in (ROOT / "crosslayer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"crosslayer"}


def test_every_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {text.partition(">=")[0].lower().replace("_", "-") for text in project["dependencies"]}
    distributions = packages_distributions()
    for name in imported_packages() - OPTIONAL:
        names = {distribution.lower().replace("_", "-") for distribution in distributions[name]}
        assert names & declared, f"{name} is imported and not declared"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["retrofit", "--help"], ["plan", "--help"]])
def test_help_comes_without_heavy_imports(words):
    code = f"""
import sys
sys.argv = ["crosslayer", *{words!r}]
from crosslayer.cli import main
try:
    main()
finally:
    print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "LOADED []"


STAGES = """
import json, sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM
from transformers import masking_utils, modeling_utils
tables = modeling_utils.AttentionInterface, masking_utils.AttentionMaskInterface
before, attention = set(sys.modules), [dict(table._global_mapping) for table in tables]
import crosslayer
assert attention == [table._global_mapping for table in tables]
imported = set(sys.modules) - before
config = AutoConfig.for_model("crosslayer", num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8,
                              num_attention_heads=2)
models = [type(auto.from_config(config)).__name__ for auto in (AutoModelForCausalLM, AutoModel)]
from crosslayer import TextSource
used = set(sys.modules) - before - imported
print(json.dumps([sorted(imported), [type(config).__name__, *models], sorted(used)]))
"""


def test_the_import_registers_the_model_and_loads_no_verb():
    """Beyond what a Llama needs, and without a change in transformers; a name is loaded when it is first used."""
    ran = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, check=True)
    imported, classes, used = json.loads(ran.stdout)
    assert classes == ["CrossLayerConfig", "CrossLayerForCausalLM", "CrossLayerModel"]
    rooms = {name.split(".")[1] for name in imported if name.startswith("crosslayer.")}
    assert rooms <= {"_path", "_start", "environment", "core"}
    packages = {name.partition(".")[0] for name in imported}
    assert not packages & {"vl_convert", "scipy", "jinja2", "typer", "rich", "psutil", "datasets", "pandas"}
    assert "crosslayer.corpus.documents" in used and "crosslayer.verbs.diagnose" not in used


def test_type_checkers_know_every_public_name():
    """The stub is where Python itself finds them; a verb is found without it, by its folder."""
    stub = (ROOT / "crosslayer" / "__init__.pyi").read_text()
    typed = {name: home for home, name in re.findall(r"(?m)^from (\S+) import (\w+) as \2$", stub)}
    assert crosslayer._homes() == typed and crosslayer.__all__ == sorted(typed)
    assert (ROOT / "crosslayer" / "py.typed").is_file()


def test_public_names_are_offered_in_every_way():
    namespace: dict = {}
    exec("from crosslayer import *", namespace)
    assert set(crosslayer.__all__) <= namespace.keys() and set(crosslayer.__all__) <= set(dir(crosslayer))
    for name in crosslayer.__all__:
        public = getattr(crosslayer, name)
        assert public is namespace[name] and public is pickle.loads(pickle.dumps(public)), name
    with pytest.raises(AttributeError, match="'crosslayer'.*'telepathy'"):
        crosslayer.telepathy  # noqa: B018
    with pytest.raises(ImportError):
        from crosslayer import telepathy  # noqa: F401


@pytest.mark.slow  # a process of its own
def test_a_command_still_offers_what_the_package_does():
    """A method of the user's own is imported by the command, and imports from crosslayer."""
    code = """
import sys
sys.argv = ["crosslayer"]
import crosslayer
assert "torch" not in sys.modules
from crosslayer import DepthPlan, CrossLayerConfig
assert DepthPlan.identity(2).layers == 2 and all(getattr(crosslayer, name) for name in crosslayer.__all__)
"""
    subprocess.run([sys.executable, "-c", code], check=True)

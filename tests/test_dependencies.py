"""Every package that the code imports is declared, and the command line starts without the heavy ones."""

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPTIONAL = {"accelerate", "datasets", "gguf", "pyarrow"}  # imported where they are used, named in the error otherwise
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


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["retrofit", "--help"]])
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

"""Benchmarks import only what the package has. Many run for hours, so nothing else would show a name that is gone."""

import ast
from importlib import import_module, util
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def exists(module: str, name: str) -> bool:
    loaded = import_module(module)
    return hasattr(loaded, name) or hasattr(loaded, "__path__") and util.find_spec(f"{module}.{name}") is not None


def test_every_name_that_a_benchmark_imports_exists():
    lost, seen = [], 0
    for path in sorted(BENCHMARKS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crosslayer"):
                seen += len(node.names)
                lost += [f"{path.name}: {each.name}" for each in node.names if not exists(node.module, each.name)]
    assert seen > 200 and not lost, lost

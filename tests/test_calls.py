"""Calls of models that hold for the whole package."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "crosslayer"
# lm-eval's own method passes use_cache=True itself; the call behind the dict of `verify` does
OTHERS = {"judge/tasks/lm.py": 1, "verbs/verify/checks.py": 1}


def keys_of(node: ast.Dict) -> set[str]:
    names = {key.id for key in node.keys if isinstance(key, ast.Name)}
    return names | {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}


def caches_without_use_cache(tree: ast.Module) -> list[int]:
    """Return the lines of calls and dicts of options that pass a cache and leave `use_cache` to the model's config."""
    wrong = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Dict) and "CACHE" in keys_of(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and "use_cache" in keys_of(node):
            wrong.discard(node.lineno)
        elif isinstance(node, ast.Call) and "use_cache" in {keyword.arg for keyword in node.keywords}:
            wrong -= {keyword.value.lineno for keyword in node.keywords}
    return sorted(wrong)


def test_whoever_passes_a_cache_says_that_it_is_used():
    """A config with `use_cache: false`, as trainers save it, makes `generate` read the whole text at every step."""
    found = {
        str(path.relative_to(PACKAGE)): caches_without_use_cache(ast.parse(path.read_text()))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "core/decoder" not in str(path)  # the model itself, which hands its cache to its layers
    }
    assert {name: len(lines) for name, lines in found.items() if lines} == OTHERS, found
    assert caches_without_use_cache(ast.parse("model(ids, **{CACHE: cache})")) == [1]
    assert caches_without_use_cache(ast.parse("model(ids, use_cache=True, **{CACHE: cache})")) == []

"""Imports go one way, and importing the package has no effect on transformers."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "crosslayer"
ORDER = (  # each part imports only parts that stand before it
    "_path", "_start", "plan", "environment", "method", "methods", "show", "decoder", "probe", "output", "corpus",
    "models", "testing", "diagnosis", "intervention", "benchmark", "verification", "generation", "conversion", "api",
    "cli",
)  # fmt: skip


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("crosslayer."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "crosslayer":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("crosslayer.")}
    return names


def test_imports_go_one_way():
    for path in PACKAGE.rglob("*.py"):
        if part(path) in ORDER:
            before = ORDER[: ORDER.index(part(path)) + 1]
            extra = imported(path) - set(before)
            assert not extra, f"{path.relative_to(PACKAGE)} imports {extra}"


def test_nothing_is_imported_before_the_working_directory_leaves_the_path():
    tree = ast.parse((PACKAGE / "_path.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert names == ["sys"] and not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_methods_never_import_one_another():
    names = {path.stem for path in (PACKAGE / "methods").glob("*.py")}
    for path in (PACKAGE / "methods").glob("*.py"):
        text = path.read_text()
        assert not [name for name in names if f"crosslayer.methods.{name} " in text or f"methods import {name}" in text]


def test_files_and_functions_are_small():
    for path in PACKAGE.rglob("*.py"):
        assert path.read_text().count("\n") <= 400, path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.body[0].lineno < 60, f"{path.name}: {node.name}"


def test_import_changes_nothing_in_transformers():
    code = (
        "import transformers.modeling_utils as u, transformers.masking_utils as k\n"
        "before = dict(u.AttentionInterface._global_mapping), dict(k.AttentionMaskInterface._global_mapping)\n"
        "import crosslayer\n"
        "assert before == (u.AttentionInterface._global_mapping, k.AttentionMaskInterface._global_mapping)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_of_methods_in_the_documents_is_the_generated_one():
    from crosslayer.show import markdown

    text = (PACKAGE.parent / "docs" / "METHODS.md").read_text()
    assert markdown() in text, "run `python -m crosslayer.show` and paste its table into docs/METHODS.md"

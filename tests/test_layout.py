"""Imports go one way, and the package keeps within its bounds."""

import ast
import contextlib
import functools
import re
import subprocess
from pathlib import Path

from crosslayer.core.methods import method_names
from website.reference import methods_table

PACKAGE = Path(__file__).parent.parent / "crosslayer"
ARCHITECTURE = (PACKAGE.parent / "docs" / "ARCHITECTURE.md").read_text()
ORDER = (
    *(name for cell in re.findall(r"^\| (`.+?`) \|", ARCHITECTURE, re.M) for name in re.findall(r"[\w/]+", cell)),
    "__main__",
)  # each package imports only packages that stand before it


def part(path: Path) -> str:
    """The package of a file, which for `core` and `verbs` is one of the packages in it."""
    first, *rest = path.relative_to(PACKAGE).parts
    if first in ("core", "verbs") and rest[0] != "__init__.py":
        return f"{first}/{rest[0].removesuffix('.py')}"
    return first.removesuffix(".py")


@functools.cache
def files() -> dict[str, Path]:
    """All modules of the package by name, a package by its `__init__`."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(["crosslayer", *path.relative_to(PACKAGE).with_suffix("").parts])
        names[name.removesuffix(".__init__")] = path
    return names


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """The modules of the package that a file names in an import, at its top or anywhere, for types too."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "crosslayer":
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "crosslayer"}
    return names & set(files())


def test_the_table_of_the_architecture_has_all_packages():
    packages = {part(path) for path in PACKAGE.rglob("*.py")} - {"core", "verbs"}  # which themselves hold a line or two
    assert set(ORDER) == packages, "the table of docs/ARCHITECTURE.md needs a row for each package and for nothing else"


def test_imports_go_one_way():
    for path in PACKAGE.rglob("*.py"):
        package = part(path)
        if package in ("core", "verbs"):
            assert not imported(path)
            continue
        assert package in ORDER, f"{path.relative_to(PACKAGE)} is in no package of the table"
        before = {*ORDER[: ORDER.index(package) + 1], "crosslayer", "core", "verbs"}
        names = files()
        extra = {name for name in imported(path) if name != "crosslayer" and part(names[name]) not in before}
        assert not extra, f"{path.relative_to(PACKAGE)} imports {extra}"


def test_no_file_imports_itself_by_way_of_others():
    """The package itself is left out: it hands out what its parts define, and they take from it only its version."""
    graph = {name: imported(path) - {name, "crosslayer"} for name, path in files().items() if name != "crosslayer"}
    with contextlib.suppress(StopIteration):
        while True:  # take away what imports nothing that is left; what stays lies on a circle, or above it
            free = next(name for name, others in graph.items() if not others & set(graph))
            del graph[free]
    assert not graph, f"circle among {circle(graph)}"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of a graph in which every file imports another."""
    path = [next(iter(graph))]
    while path[-1] not in path[:-1]:
        path.append(min(graph[path[-1]] & set(graph)))
    return path[path.index(path[-1]) :]


def test_no_method_is_named_outside_its_file():
    names = "|".join(map(re.escape, method_names()))
    word = re.compile(rf"\b({names})\b", re.IGNORECASE)
    lines = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if part(path) == "core/methods":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if word.search(line):
                lines.append(f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}")
    assert not lines, "rename the method, or say it without the method's name:\n" + "\n".join(lines)


def test_nothing_is_imported_before_the_working_directory_leaves_the_path():
    tree = ast.parse((PACKAGE / "_path.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert names == ["sys"] and not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_methods_never_import_one_another():
    names = {path.stem for path in (PACKAGE / "core" / "methods").glob("*.py")}
    for path in (PACKAGE / "core" / "methods").glob("*.py"):
        text = path.read_text()
        assert not [
            name for name in names if f"crosslayer.core.methods.{name} " in text or f"methods import {name}" in text
        ]


# Room to write a thing as it reads best, and for a few new methods, policies and measures; not a target.
# lines that hold nothing but a comment count against no limit: whoever says why must not have to shorten the code
LINES_IN_ALL = 42_500
LINES, BODY = 400, 60  # of a file; of a function, without signature and docstring, so that any option can be explained


def counted(lines: list[str]) -> int:
    """How many of some lines are not comments alone."""
    return sum(not line.lstrip().startswith("#") for line in lines)


def body_lines(function: ast.FunctionDef, lines: list[str]) -> int:
    """How many lines the statements of a function have, from the first behind its docstring, in a file of `lines`."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return counted(lines[body[0].lineno - 1 : body[-1].end_lineno]) if body else 0


def test_files_and_functions_are_small():
    large = []
    for path in sorted(PACKAGE.rglob("*.py")):
        lines, name = path.read_text().splitlines(), path.relative_to(PACKAGE)
        if (count := counted(lines)) > LINES:
            large.append(f"{name} has {count} lines, at most {LINES} are allowed: move one idea to a file of its own")
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and (count := body_lines(node, lines)) > BODY:
                large.append(
                    f"{node.name} in {name} has {count} lines of statements, at most {BODY} are allowed (signature and "
                    "docstring do not count): move a step of it to a function"
                )
    assert not large, "\n".join(large)


def test_signature_docstring_and_comments_do_not_count_as_lines_of_a_function():
    options = "".join(f"    option{number}: int = 0,\n" for number in range(50))
    statements = "".join(f"    # why\n    {number}\n" for number in range(60))
    for docstring in ("", '    """One.\n\n' + "    two\n" * 80 + '    """\n'):
        text = f"def f(\n{options}):\n{docstring}{statements}"
        (function,) = ast.parse(text).body
        assert body_lines(function, text.splitlines()) == 60
    text = 'def f():\n    """One."""'
    (empty,) = ast.parse(text).body
    assert body_lines(empty, text.splitlines()) == 0


def test_no_file_has_the_marks_of_a_merge():
    root = PACKAGE.parent
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    mark = re.compile(rb"(?m)^(?:<{7}|>{7}|\|{7})(?: |\r?$)")
    marked = [name for name in names.split("\0") if (root / name).is_file() and mark.search((root / name).read_bytes())]
    assert not marked, f"resolve the conflict in {', '.join(marked)}"


def test_the_table_of_methods_in_the_documents_is_the_generated_table():
    text = (PACKAGE.parent / "docs" / "methods" / "overview.md").read_text()
    assert methods_table() in text, "run make tables"


def test_nobody_passes_a_progress_meter():
    """Progress is a context (`output/progress.py`), not a parameter of every function on the way."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
                assert not {"progress", "meter"} & set(names) or path.name == "progress.py", f"{path}: {node.name}"


def test_the_package_leaves_room_and_does_not_grow_without_end():
    lines = sum(counted(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    assert lines <= LINES_IN_ALL, (
        f"crosslayer/ has {lines:,} lines, at most {LINES_IN_ALL:,} are allowed: look for an idea written twice "
        "and keep one; a feature that a paper names stays. If neither helps, raise LINES_IN_ALL (tests/test_layout.py)"
    )


def test_every_value_with_an_interval_is_an_estimate():
    """One shape of interval (`output/record.py`), so that pages, tables and verdicts read all of them alike."""
    intervals = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ci95" in node.target.id:
                intervals.append(f"{path.relative_to(PACKAGE)}: {node.target.id}")
    assert intervals == ["output/record.py: ci95"]  # of a measure by layer


def test_only_the_core_and_the_choosers_know_methods_that_choose_tokens():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] != "core" and path.name != "choosers.py":
            assert not re.findall(r"\b(?:ChoiceMethod|has_choices|can_share)\b", path.read_text()), path


def prose_words(literal: ast.AST) -> int:
    """How many plain words a literal has: names, options and numbers do not count."""
    text = literal.value if isinstance(literal, ast.Constant) and isinstance(literal.value, str) else ""
    return sum(bool(re.fullmatch(r"[A-Za-z][a-z]+[,.;:]?", word)) for word in text.split())


def test_few_tests_hold_a_sentence_to_its_words():
    """Tests assert numbers, names and options, so that a sentence can be rewritten."""
    found = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            texts = []
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "raises":
                texts = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
            elif isinstance(node, ast.Compare):
                texts = [node.left, *node.comparators]
            found += [f"{path.name}:{text.lineno}" for text in texts if prose_words(text) >= 3]
    assert len(found) <= 100, found

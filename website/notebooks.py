"""Notebooks that are kept as scripts, in jupytext's percent format: `python website/notebooks.py SCRIPT …`.

Each is executed in an empty folder, and a page of its text, code, output and pictures is written beside it.
"""

import ast
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

CELL = re.compile(r"^# %%( \[markdown\])?\n", re.M)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def cells(script: str) -> list[tuple[bool, str]]:
    """Return the cells of a script in order: whether one is text, and its Markdown or its code."""
    parts = CELL.split(script)[1:]
    found = []
    for mark, body in zip(parts[::2], parts[1::2], strict=True):
        text = mark is not None
        found.append((text, re.sub(r"(?m)^# ?", "", body).strip() if text else body.strip()))
    return found


def run(script: Path, folder: Path) -> list[str]:
    """Execute the code of a notebook in a folder, cell by cell, and return what each prints.

    What stands alone in a cell's last line is printed as well, unless it is None, as notebooks do.
    """
    code = [body for text, body in cells(script.read_text(encoding="utf-8")) if not text]
    beside, space, printed = str(script.parent.resolve()), {"__name__": "__main__"}, []
    sys.path.insert(0, beside)  # where Python finds modules that lie beside a script
    try:
        with contextlib.chdir(folder):
            for cell in code:
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    _execute(cell, space)
                printed.append(output.getvalue().rstrip())
    finally:
        sys.path.remove(beside)
    return printed


def _execute(code: str, space: dict[str, Any]) -> None:
    *before, last = ast.parse(code).body
    alone = isinstance(last, ast.Expr)
    exec(compile(ast.Module(before if alone else [*before, last], []), "cell", "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
        if value is not None:
            print(value)


def page(script: Path, printed: list[str]) -> str:
    """Return the page of a notebook with what its cells have printed."""
    outputs, parts = iter(printed), []
    for text, body in cells(script.read_text(encoding="utf-8")):
        parts.append(body if text else f"```python\n{body}\n```")
        if not text and (output := next(outputs)):
            parts.append(f"```text\n{output}\n```")
    return "\n\n".join(parts) + "\n"


def write(script: Path) -> None:
    """Execute a notebook and write its page, and the pictures that its text shows, beside it."""
    with tempfile.TemporaryDirectory() as name:
        text = page(script, run(script, Path(name)))
        for picture in PICTURE.findall(text):
            target = script.parent / script.stem / Path(picture).name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(name) / picture, target)
            text = text.replace(f"({picture})", f"({os.path.relpath(target, script.parent)})")
    script.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for path in sys.argv[1:]:
        write(Path(path))

"""What docs/METHODS.md tells authors of methods works as it stands there, outside of the package."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from crosslayer.testing import CHECKS

ROOT = Path(__file__).parent.parent.parent
WORDS = ("Scaled values.", "V'_n = s V_n", "Scaled(by=2.0)", "cached share: 100.00%", "KV bytes per token in bf16")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The documents' method as a plain module and in a package, and the documents' test of it."""
    section = (ROOT / "docs" / "METHODS.md").read_text().partition("## A method of your own")[2]
    method, test = re.findall(r"```python\n(.+?)```", section, re.S)
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "__init__.py").write_text("")
    for name in ("scaled.py", "my_methods/scaled.py"):
        (tmp_path / name).write_text(method)
    (tmp_path / "test_scaled.py").write_text(test)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ("my_methods", "scaled")]:
        del sys.modules[name]


def test_a_module_shows_itself_however_it_is_run(folder, capsys):
    runpy.run_path(str(folder / "scaled.py"), run_name="__main__")
    by_path = capsys.readouterr().out
    for name in ("scaled", "my_methods.scaled"):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        assert capsys.readouterr().out == by_path
    assert all(word in by_path for word in WORDS), by_path


def test_the_documents_test_passes(folder):
    test = runpy.run_path(str(folder / "test_scaled.py"))
    for check in CHECKS:
        test["test_scaled"](check)
    test["test_scaled_with_others"]()

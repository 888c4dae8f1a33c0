"""The rules of styles/ find what they are for; `make style` runs them over pages, help and messages."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "styles"))
from check import findings, rules  # noqa: E402


def found(folder: Path, text: str, name: str = "page.md") -> list[str]:
    """Return the line and rule of each finding in a text."""
    (folder / name).write_text(text)
    return [f"{line} {message.partition(':')[0]}" for line, message in sorted(findings(folder / name, rules()))]


@pytest.mark.parametrize(
    "text, rule",
    [
        ("It is no\n  part of it.", "1 Calques"),
        ("A row\nbeside it.", "2 Calques"),
        ("It begins. Who only wants bytes quantizes first.", "1 Headless"),
        ("Use it in order to save.", "1 Wordy"),
        ("It is very small.", "1 Weasel"),
        ("70 % of it", "1 Percent"),
        ("A table of of it", "1 Repetition"),
        ("A receipt of it", "1 Terms"),
        ("In Pytorch", "1 Vocabulary"),
    ],
)
def test_a_rule_finds_its_text(tmp_path, text, rule):
    assert found(tmp_path, text) == [rule]


def test_plain_text_and_code_pass(tmp_path):
    assert (
        found(tmp_path, "There is no such layer, and 70% is no longer kept.\n\n```sh\nbeside\n```\n\n`beside` it\n")
        == []
    )


def test_strings_of_python_are_read(tmp_path):
    code = (
        'def f(x):\n    """Is no doc."""\n    name = "beside"\n    raise ValueError(f"{x} lies beside {name} here")\n'
    )
    assert found(tmp_path, code, "code.py") == ["2 Calques", "4 Calques"]

"""Errors that a user meets have one shape: `--option must be X, got Y; try Z`, or a fact about a named thing.

The command line adds `crosslayer: error:` in front, and writes an option as `--option`.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VALUE = "\0"  # stands for a formatted value
RULES = {  # what a message must not match, and what to write
    r"\n|\.$": "one line, without a period at its end",
    r"^(?:[Ee]rror|[Ii]nvalid|[Uu]nknown|[Ii]llegal|[Bb]ad|[Gg]ot)\b": "the option or the thing first",
    r"^(?:[Gg]ive|[Pp]ass|[Uu]se|[Ss]et|[Rr]emove|[Ww]rite|[Cc]hoose|[Tt]ry)\b": "what is wrong before what to do",
    r"\b(?:please|sorry|you|your|should|invalid|illegal)\b": "what it must be, got Y; then what to do",
    r"; (?:it|they|this|both) must\b|\bneeded (?:is|are)\b": "X must be Y, got Z: one clause",
    r"(?<!,) got \0": "', got ' before the given value",
    r"is not known; use\b": "X must be one of Y, got Z",
}
GIVEN = "'must' needs ', got ' and the given value"


def template(node: ast.AST | None) -> str | None:
    """Return the text of a constant, an f-string or their sum, with `VALUE` for values; None for anything else."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(VALUE if isinstance(part, ast.FormattedValue) else str(template(part)) for part in node.values)
    if isinstance(node, ast.BinOp):
        left, right = template(node.left), template(node.right)
        return None if left is None or right is None else left + right
    return None


def messages(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the line and text of each `raise ValueError(text)`."""
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    errors = [call for call in raised if isinstance(call.func, ast.Name) and call.func.id == "ValueError" and call.args]
    texts = [(call.lineno, template(call.args[0])) for call in errors]
    return [(line, text) for line, text in texts if text is not None]


def problems(text: str) -> list[str]:
    """Return what to change in a message."""
    wrong = [advice for pattern, advice in RULES.items() if re.search(pattern, text)]
    required = re.search(rf"\bmust (?!not\b).*{VALUE}|{VALUE}.*\bmust (?!not\b)", text)
    return wrong + ([GIVEN] if required and ", got " not in text else [])


@pytest.mark.parametrize(
    "text", ["`length` must be at least 2, got \0", "\0 has no tokenizer; pass one", "x and y differ"]
)
def test_good_messages(text):
    assert problems(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "`length` is \0; it must be at least 2",
        "Invalid length: \0",
        "`length` must be at least \0",
        "`length` must be at least 2 (got \0)",
        "give a longer text",
        "The text is too short.",
        "you should give a longer text",
        "bos = \0 is not known; use yes or no",
    ],
)
def test_bad_messages(text):
    assert problems(text)


def test_every_message_has_the_shape():
    found = []
    for path in sorted((ROOT / "crosslayer").rglob("*.py")):
        for line, text in messages(ast.parse(path.read_text())):
            name = f"{path.relative_to(ROOT)}:{line}: {text.replace(VALUE, '{}')!r}"
            found += [f"{name}: {advice}" for advice in problems(text)]
    assert not found, "\n".join(found)

"""Check the English of pages, help and messages by the rules of this folder, which are in Vale's format.

    python styles/check.py README.md docs crosslayer

Of Markdown it reads what is not code, of Python the docstrings and strings of three words or more. It implements what
the rules here use of Vale: `existence`, `substitution`, and the case of the vocabulary's terms.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

HERE = Path(__file__).parent
CODE = re.compile(  # fenced and inline code, struck words, links' targets, HTML, formulas, URLs
    r"^([ >]*)(`{3,}|~{3,}).*?^\1\2 *$|(`+)(?!`).+?(?<!`)\3(?!`)|~~[^~]+~~|\]\([^)]*\)|<[^>\n]*>|\$[^$\n]+\$|https?://\S+",
    re.MULTILINE | re.DOTALL,
)
Rule = tuple[str, re.Pattern[str], str]  # name, what it finds, message


def rules() -> list[Rule]:
    """Return the rules of the style and of the vocabulary."""
    found: list[Rule] = []
    for path in sorted((HERE / "crosslayer").glob("*.yml")):
        rule = yaml.safe_load(path.read_text())
        for pattern, better in rule.get("swap", dict.fromkeys(rule.get("tokens", []))).items():
            bounded = pattern if rule.get("nonword") else rf"(?<![\w-])(?:{pattern})(?![\w-])"
            flags = re.IGNORECASE if rule.get("ignorecase") else 0
            message = rule["message"].replace("%s", better, 1) if better else rule["message"]
            found.append((path.stem, re.compile(bounded.replace(" ", r"\s"), flags), message))
    for term in (HERE / "config/vocabularies/crosslayer/accept.txt").read_text().split("\n"):
        if term and not term.startswith("(?i)"):  # those have lower-case forms in commands
            pattern = rf"(?<![\w./@-])(?!{term}(?!\w))(?i:{term})(?![\w./@-])"
            found.append(("Vocabulary", re.compile(pattern), f"Write '{term}' instead of '%s'."))
    return found


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, with the line each begins in; code is blanked."""
    if path.suffix != ".py":
        yield 1, path.read_text()
        return
    tree = ast.parse(path.read_text())
    parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and id(node) not in parts and str(node.value).count(" ") > 1:
            yield node.lineno, str(node.value)


def findings(path: Path, checks: list[Rule]) -> Iterator[tuple[int, str]]:
    """Yield the line and message of everything that the rules find in a file."""
    for first, text in prose(path):
        blank = CODE.sub(lambda code: re.sub(r"[^\n]", "`", code.group()), text)
        blank = re.sub(r"\n[ >]+", "\n", blank)  # a line's end is one space
        for name, pattern, message in checks:
            for match in pattern.finditer(blank):
                line = first + blank.count("\n", 0, match.start())
                yield line, f"{name}: {message.replace('%s', ' '.join(match.group().split()))}"


def main(roots: list[str]) -> int:
    """Print the findings in files and folders, and return how many there are."""
    checks, count = rules(), 0
    for root in map(Path, roots):
        files = sorted(path for kind in ("md", "py") for path in root.rglob(f"*.{kind}")) if root.is_dir() else [root]
        for path in files:
            for line, message in sorted(findings(path, checks)):
                print(f"{path}:{line}: {message}")
                count += 1
    return count


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))

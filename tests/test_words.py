"""Names, messages, help and pages use the field's words, one for a thing: the words that they replaced stay away."""

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REPLACED = {  # pattern → what to write
    r"receipts?": "report",
    r"lenders?|borrowers?|owners?|leaders?|followers?|anchors?": "source, reader",
    r"arms?": "variant",
    r"gone|taken away|takes? away|taking away": "dropped, removed, evicted",
    r"places?": "index, path, position",
    r"looks?|glances?": "probe, snapshot, inspect",
    r"rooms?|houses?": "package, space, capacity",
    r"rewir\w+": "convert",
    r"drained": "small value norm",
    r"(?:is|are) none|of which|no per ?cents?": "say it directly",
}
WORDS = re.compile("|".join(rf"(?<![a-z-])(?:{pattern})(?![a-z-])" for pattern in REPLACED))
FINE = re.compile(
    r"in[- ]place|looks? (?:like|up|binary)|look-?up|owner/\w+|owner, name|there (?:is|are) none"
    r"|(?:first|last|all|each|one|some|both|plan) of which"
)
OWN = {  # words that are somebody else's: a paper's, a format's, data
    "crosslayer/core/methods/svformer.py": {"anchor", "anchors"},
    "crosslayer/judge/phrasing.py": {"anchor"},
    "crosslayer/training/recipe_file.py": {"anchor"},
    "docs/methods/overview.md": {"anchor", "anchors"},
    "docs/papers/resformer.md": {"anchors"},
}
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
PAGES = [name for name in TRACKED if name.endswith(".md") and name != "CHANGELOG.md"]
CODE = [name for name in TRACKED if name.startswith("crosslayer/") and name.endswith(".py")]


def replaced_words(text: str, own: frozenset[str] = frozenset()) -> list[str]:
    """The replaced words of a text; those of a snake_case or CamelCase name count too."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.replace("None", "")).replace("_", " ").lower()
    return [word for word in WORDS.findall(FINE.sub("", " ".join(spaced.split()))) if word not in own]


def test_words_are_found_in_names_and_sentences():
    assert replaced_words("find_receipts") == ["receipts"] and replaced_words("class RunningArm") == ["arm"]
    assert replaced_words("It is\nnone of them, and is gone.") == ["is none", "gone"]
    assert replaced_words("in place, looks like warm, place-holder, displaced") == []


@pytest.mark.parametrize("page", PAGES)
def test_pages(page):
    assert replaced_words((ROOT / page).read_text(), frozenset(OWN.get(page, ()))) == []


def test_code():
    """Names, texts and comments of the package, not the words of Python itself."""
    written = {tokenize.NAME, tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    found = []
    for path in CODE:
        own = frozenset(OWN.get(path, ()))
        for token in tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline):
            if token.type in written:
                found += [f"{path}:{token.start[0]}: {word}" for word in replaced_words(token.string, own)]
    assert not found, f"write {REPLACED}"

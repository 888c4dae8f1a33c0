"""What holds of every verb, and that adding one edits nothing."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import crosslayer
from crosslayer.cli import app
from crosslayer.cli.declared import REQUIRED, read_verb
from crosslayer.verbs import GROUPS, verb_names
from website.reference import commands_page, section

ROOT = Path(__file__).parents[2]
COMMANDS = vars(typer.main.get_command(app))["commands"]
TOY = {
    "__init__.py": '"""Counts words."""\n\nGROUP = "Inspect"\n',
    "result.py": '''
"""What was counted."""
from typing import Literal
from pydantic import Field
from crosslayer.output.result import Result

class Count(Result):
    """Words."""

    schema_: Literal["crosslayer/count/1"] = Field(default="crosslayer/count/1", alias="schema")
    words: int

    def sentences(self):
        """Say it."""
        return [f"{self.words} words."]

    def headline(self):
        """Return the number."""
        return {"words": self.words}
''',
    "page.py": '''
"""Its page."""
from crosslayer.output.page import Page

def layout(record):
    """Return the page."""
    return Page("Count", "", [], record.sentences(), [], [])
''',
    "run.py": '''
"""Counts."""
from collections.abc import Sequence
from crosslayer.verbs.count.result import Count

def count(text: str, *, times: int = 1, sizes: Sequence[int] = (2, 3), loud: bool = False) -> Count:
    """Count words.

    Args:
        text: what is counted.
        times: how often.
        sizes: what is added.
        loud: whether once more.

    """
    return Count(words=len(text.split()) * times + sum(sizes) + loud)
''',
}


@pytest.mark.parametrize("name", verb_names())
def test_a_verb_says_what_its_options_are(name):
    verb = read_verb(name)
    assert verb.group in GROUPS and verb.call.about
    assert all(option.text.endswith(".") for option in verb.call.parameters), verb.call.parameters
    assert len({option.name for option in (*verb.arguments, *verb.options)}) == len((*verb.arguments, *verb.options))
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert section(verb) in page, "run make tables"
    assert all(f"`{option.flag}`" in page for option in verb.options)


def test_the_page_of_all_commands_is_of_this_package():
    assert (ROOT / "docs" / "reference" / "commands.md").read_text() == commands_page(), "run make tables"


@pytest.mark.parametrize("name", verb_names())
def test_the_shell_and_python_have_the_same_defaults(name):
    """As Python sees the signature, and as typer does the command."""
    call, command = (
        inspect.signature(getattr(crosslayer, name)),
        {option.name: option for option in COMMANDS[name.replace("_", "-")].params},
    )
    for option in read_verb(name).call.parameters:
        default = call.parameters[option.name].default
        assert option.text.startswith("in Python") or option.name == "interventions" or option.name in command
        if option.default is REQUIRED:
            assert default is inspect.Parameter.empty
        elif not option.text.startswith("in Python"):
            assert default == option.default
            shown = ",".join(map(str, default)) if option.has_commas else default
            assert command[option.name].default == (None if default == () else shown)


@pytest.mark.slow  # processes of their own
def test_a_verb_is_one_new_folder(tmp_path):
    """In a copy of the package: its help, its call, its result and the table of its options, with no file changed."""
    shutil.copytree(ROOT / "crosslayer", tmp_path / "crosslayer", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "crosslayer" / "verbs" / "count"
    folder.mkdir()
    for name, text in TOY.items():
        (folder / name).write_text(text)
    code = """
import crosslayer
from crosslayer.cli.declared import read_verb
sys.path.append(WEBSITE)
from reference import table
from crosslayer.verbs import verb_names
assert crosslayer.__file__.startswith(FOLDER) and "count" in verb_names() and "count" in crosslayer.__all__
print(table(read_verb("count")))
loaded = crosslayer.load_result("out")
counted = crosslayer.count("a b c", times=2, sizes=(5,), loud=True)
assert loaded.words == counted.words and counted.command is None
assert loaded.command == "crosslayer count 'a b c' --times 2 --sizes 5 --loud --out out"
"""
    code = f"import sys\n{code}".replace("FOLDER", repr(str(tmp_path))).replace("WEBSITE", repr(str(ROOT / "website")))

    def ran(*words):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert re.search(r"count +Count words\.", ran("-m", "crosslayer", "--help"))
    out = ran("-m", "crosslayer", "count", "a b c", "--times", "2", "--sizes", "5", "--loud", "--out", "out")
    assert out.splitlines() == ["12 words.", "report: out/report.html", json.dumps({"words": 12})]
    shown = ran("-c", code)
    assert "`--sizes`" in shown and "required" in shown

"""Every command of the papers' pages runs as printed, in the order of its page, or its row is marked.

A mark in the column *time* says that a command needs more than the installed package. All others run from a wheel, in
a process that imports nothing of this clone. A tiny model of as many layers, with the real tokenizer, takes the place
of smollm2, gemma3 and qwen. Commands that a page expects to take longer than a minute get smaller samples behind their
own options, trainings two steps; comparisons, which are many trainings, are only read.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import crosslayer
from crosslayer.models.embedded import EMBEDDED
from crosslayer.training.recipe import load_recipe
from tests.helpers.tiny import tiny
from tests.test_docs import blocks

ROOT = Path(__file__).parent.parent
PAGES = ("attention-residuals", "resformer", "uniattn", "waiver")
MARKS = {"hub", "GPU", "clone", "texts", "instructions"}
TIME = re.compile(r"[\d–-]* ?(s|min|hours?|half an hour|minutes to hours)\b")
STEPS = ("tokens=null", "steps=2", "warmup=1")
SHORT = {
    "train": [word for field in STEPS for word in ("--set", f"schedule.{field}")] + ["--set", "eval.windows=2"],
    "diagnose": ["--sequences", "2", "--length", "64"],
    "bench": ["--contexts", "64", "--new-tokens", "4"],
    "needles": ["--lengths", "256", "--samples", "2"],
}

DRIVER = """
import json, sys, time
import crosslayer
from crosslayer.cli import main
assert "site" in crosslayer.__file__, crosslayer.__file__
for words in json.loads(sys.argv[1]):
    sys.argv, started = words, time.monotonic()
    print("RUN", " ".join(words), flush=True)
    try:
        main()
    except SystemExit as ended:
        print("ENDED", ended.code or 0, round(time.monotonic() - started), flush=True)
"""


class Command(NamedTuple):
    """A command of a page, with the time and the marks in its row."""

    words: tuple[str, ...]
    time: str
    marks: frozenset[str]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def in_tables(lines: list[str]) -> list[tuple[int, Command]]:
    """Return the commands of the tables with a column *command*, each with the number of its line."""
    found, head = [], None
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells(line)
        elif "command" in head:
            row = dict(zip(head, cells(line), strict=True))
            time = next(cell for name, cell in row.items() if name.startswith("time"))
            marks = frozenset(re.findall(r"`(\w+)`", time))
            for code in re.findall(r"`(crosslayer [^`]+)`", row["command"]):
                found.append((number, Command(tuple(shlex.split(code)), time, marks)))
    return found


def commands(page: str) -> list[Command]:
    """Return the commands of a page in its order, those of blocks too; a mark of a block stands in its title."""
    text = (ROOT / "docs" / "papers" / f"{page}.md").read_text()
    found = in_tables(text.splitlines())
    for block in blocks(f"docs/papers/{page}.md"):
        if block.kind == "sh":
            number = text[: text.index(block.body)].count("\n")
            marks = frozenset(mark for mark in MARKS if mark in block.title)
            found += [(number, Command(tuple(words), block.title, marks)) for words in block.commands]
    return [command for _, command in sorted(found, key=lambda pair: pair[0])]


ALL = {page: commands(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_a_command_says_how_long_it_takes_or_what_it_needs(page):
    for command in ALL[page]:
        assert command.marks <= MARKS, command
        assert command.marks or TIME.search(command.time) or "cores" in command.time, command


def test_what_a_command_needs_is_marked():
    for command in (command for of_page in ALL.values() for command in of_page):
        words = command.words
        named = [word for word in words[2:] if re.fullmatch(r"[\w.-]+/[\w.-]+", word)]
        named = [name for name in named if not name.endswith("/model") and not name.startswith(("runs/", "nine/"))]
        assert not named or command.marks & {"hub", "GPU"}, command
        recipe = (
            words[2] if words[1] == "train" else words[words.index("--recipe") + 1] if "--recipe" in words else None
        )
        if words[1] in ("train", "compare") and recipe is not None:
            sources = [domain.source or "" for domain in load_recipe(recipe).data.domains]
            assert any(source.startswith("texts/") for source in sources) == ("texts" in command.marks), command


@pytest.mark.parametrize("page", PAGES)
def test_no_command_writes_into_the_folder_of_another(page):
    """The same command twice would find its own folder; a row refers to the run of an earlier one instead."""
    folders = [command.words[command.words.index("--out") + 1] for command in ALL[page] if "--out" in command.words]
    assert len(folders) == len(set(folders))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the installed wheel, and nothing else of ours."""
    if find_spec("build") is None:
        pytest.skip("build is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    call = (sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    subprocess.run(call, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    call = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "site", wheel)
    subprocess.run(call, check=True, capture_output=True)
    return folder / "site"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A cache in which the embedded causal models are tiny."""
    folder = tmp_path_factory.mktemp("cache")
    try:
        tokenizer = crosslayer.load_model("smollm2")[1]
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 8192, "dtype": torch.float32}
    windowed = [*["sliding_attention"] * 5, "full_attention"] * 3
    shapes = {
        "smollm2": ("llama", {"num_hidden_layers": 30}),
        "gemma3": ("gemma3_text", {"num_hidden_layers": 18, "layer_types": windowed}),
        "qwen": ("qwen2", {"num_hidden_layers": 24}),
    }
    for name, (family, shape) in shapes.items():
        of_model = folder / f"{name}-{EMBEDDED[name].sha256[:16]}"
        tiny(family, **shape, **sizes).save_pretrained(of_model)
        tokenizer.save_pretrained(of_model)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_without_a_mark_runs_from_a_wheel(page, installed, models, tmp_path):
    calls = []
    for command in ALL[page]:
        verb, short = command.words[1], command.time.endswith(" s") or command.words[1] == "intervene"
        if not command.marks and verb != "compare":
            calls.append([*command.words, *([] if short else SHORT.get(verb, []))])
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = outside | {"CROSSLAYER_CACHE": str(models), "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # threads of tiny products wait for each other beside other work
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(calls)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    ended = re.findall(r"(?m)^RUN (.*)\n(?:.*\n)*?ENDED (\d+)", done.stdout)
    failed = [words for words, code in ended if code != "0"]
    assert len(ended) == len(calls) and not failed, f"{failed}\n{done.stderr[-3000:]}"

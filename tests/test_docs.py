"""Every block of code in README.md and docs/ runs as it stands there, or says what it needs.

A tiny model with as many layers takes the place of smollm2. What a block needs stands in its first line, as in
```` ```console title="needs a GPU" ````; the site shows it. All commands are at least read by the command line.
"""

import inspect
import itertools
import re
import shlex
import tomllib
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer

import crosslayer
from crosslayer.cache.policies import POLICIES
from crosslayer.cli import app, main
from crosslayer.core.methods import method_names
from crosslayer.models import embedded
from crosslayer.verbs.diagnose.result import Measures
from crosslayer.verbs.retrofit.moments import is_enough
from tests.helpers.daily import daily
from tests.helpers.text import WORDS, tokenizer, words
from tests.helpers.tiny import tiny

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ELSEWHERE = {"docs/methods/your_own.md"}  # executed by test_your_method.py
NOTEBOOKS = {page.relative_to(ROOT).as_posix() for page in (DOCS / "notebooks").glob("*.md")}  # … test_notebooks.py
FRONT = ("README.md", "docs/start/tour.md")
PAGES = sorted(
    {page.relative_to(ROOT).as_posix() for page in DOCS.rglob("*.md")} - ELSEWHERE - NOTEBOOKS | {"README.md"}
)
FENCE = re.compile(r'(?m)^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```$', re.S)
VARIABLE = re.compile(r"[A-Z]+=")  # set for the command behind it
WITH_RETROFIT = {"docs/guides/measure.md"}  # needs the folder that retrofit makes
LONG = {
    f"docs/{page}.md"
    for page in ("guides/convert", "guides/inspect", "guides/measure", "methods/overview", "start/tour")
}


class Block(NamedTuple):
    """A block of code on a page."""

    kind: str
    title: str
    body: str

    @property
    def runs(self) -> bool:
        return not self.title

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of ours: in `console` behind a prompt, else every line; `#` begins a comment."""
        found, open_line = [], ""
        for line in self.body.splitlines():
            if open_line or line.startswith("$ ") or self.kind == "sh":
                try:
                    words = shlex.split(open_line + line.removeprefix("$ "), comments=True)
                    found.append(list(dropwhile(VARIABLE.match, words)))
                    open_line = ""
                except ValueError:  # a quotation goes on in the next line
                    open_line += line + " "
        return [words for words in found if words[:1] == ["crosslayer"]]


def blocks(page: str) -> list[Block]:
    return [Block(*(part or "" for part in found)) for found in FENCE.findall((ROOT / page).read_text())]


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """A working directory with what pages speak of; smollm2 is tiny, and its tokens are words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "cache"))
    smollm2 = tmp_path / "cache" / f"smollm2-{embedded.EMBEDDED['smollm2'].sha256[:16]}"
    sizes = {"vocab_size": len(WORDS), "max_position_embeddings": 512, "dtype": torch.float32}
    layers = 6 if request.node.callspec.params["page"] == "docs/guides/store.md" else 30  # a codec fits every layer
    tiny("llama", num_hidden_layers=layers, **sizes).save_pretrained(smollm2)
    tokenizer(unk_token="[UNK]").save_pretrained(smollm2)
    if request.node.callspec.params["page"] in WITH_RETROFIT:
        crosslayer.convert(tiny("llama", **sizes), {"name": "cla"}).model.save_pretrained("small")
        tokenizer(unk_token="[UNK]").save_pretrained("small")
    Path("notes.txt").write_text(words(0, 500))
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    for block in blocks(page):
        assert block.kind in {"console", "sh", "python", "yaml", "text", "math"}, block
        assert not block.title or block.title.startswith("needs "), block.title


@pytest.mark.parametrize("page", PAGES)
def test_the_command_line_knows_every_command(page):
    cli = typer.main.get_command(app)
    for block in blocks(page):
        for _, verb, *rest in block.commands:
            cli.commands[verb].make_context(verb, rest, resilient_parsing=False)


PAPERS = sorted(page for page in PAGES if page.startswith("docs/papers/"))


@pytest.mark.parametrize("page", PAPERS)
def test_the_command_line_knows_every_command_of_a_paper(page):
    """The commands in the tables *figure → command → … → verdict*, and the figures beside them."""
    cli, text = typer.main.get_command(app), (ROOT / page).read_text()
    commands = [shlex.split(code) for code in re.findall(r"`(crosslayer [^`]+)`", text)]
    assert len(commands) >= 10
    for _, verb, *rest in commands:
        cli.commands[verb].make_context(verb, rest, resilient_parsing=False)
    figures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert figures and all((ROOT / page).parent.joinpath(figure).is_file() for figure in figures)


@pytest.mark.parametrize("page", FRONT)
def test_the_commands_of_the_front_pages_stand_on_other_pages(page):
    shown = {tuple(words) for page in set(PAGES) - set(FRONT) for block in blocks(page) for words in block.commands}
    for block in blocks(page):
        for command in block.commands:
            assert tuple(command) in shown, " ".join(command)


def test_a_guide_shows_every_command():
    guides = [page for page in PAGES if page.startswith("docs/guides/")]
    shown = {words[1] for page in guides for block in blocks(page) for words in block.commands}
    assert shown == set(typer.main.get_command(app).commands), "show each command in a page of docs/guides/"


RUNNING = [page for page in PAGES if any(block.runs for block in blocks(page))]


@pytest.mark.parametrize(("page", "names"), [("measure", POLICIES), ("inspect", Measures.model_fields)])
def test_every_policy_and_every_measure_is_in_its_guide(page, names):
    text = (DOCS / "guides" / f"{page}.md").read_text()
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing, f"docs/guides/{page}.md needs a row for each"


def test_every_method_has_its_equation():
    headings = re.findall(r"(?m)^### `(\w+)`\n\n```math\n", (DOCS / "methods" / "overview.md").read_text())
    assert sorted(headings) == sorted(method_names()), (
        "docs/methods/overview.md needs a heading and an equation of each"
    )


@pytest.mark.parametrize("page", daily(RUNNING, *(page for page in RUNNING if page not in LONG)))
def test_what_needs_nothing_runs(page, folder, monkeypatch, capsys):
    model, tokens = crosslayer.load_model("smollm2")
    space = {"crosslayer": crosslayer, "torch": torch, "model": model, "tokenizer": tokens}
    space["ids"] = torch.arange(3, 15)[None]
    for block in blocks(page):
        if block.runs and block.kind == "python":
            exec(compile(block.body, page, "exec"), space)
        for command in block.commands if block.runs else []:
            monkeypatch.setattr("sys.argv", command)
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 0, capsys.readouterr().err


def test_the_version_of_a_source_tree_is_the_fallback_of_the_build():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["fallback-version"]
    assert f'return "{built}"' in inspect.getsource(crosslayer._version)


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of a table on a page, below its head, by row."""
    _, _, table = (ROOT / page).read_text().partition(f"{head}\n")
    lines = itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()[1:])
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_usage_lists_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {row[0].strip("`") for row in rows("docs/README.md", "| extra | adds |")}
    assert listed == set(project["optional-dependencies"])


NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBERS += [f"{stem}teen" for stem in ("thir", "four", "fif", "six", "seven", "eigh", "nine")]
NUMBERS += ["twenty", *(f"twenty-{digit}" for digit in NUMBERS[1:10])]


def test_the_number_of_methods_and_of_findings_is_that_of_the_pages():
    tour, findings = (ROOT / "docs/start/tour.md").read_text(), (ROOT / "docs/results/findings.md").read_text()
    (methods,) = re.findall(r"`crosslayer methods` lists all ([\w-]+):", tour)
    assert NUMBERS.index(methods) == len(method_names()), "docs/start/tour.md says how many methods there are"
    count = NUMBERS[len(re.findall(r"(?m)^## \d+\. ", findings))]
    assert f"[{count} findings](results/findings.md)" in (ROOT / "docs/README.md").read_text()
    assert f"[{count.capitalize()} findings](docs/results/findings.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("page", "head", "verb"),
    [
        ("docs/guides/train.md", "| on the page | meaning |", "compare"),
        ("docs/guides/convert.md", "| on the page | meaning |", "heal"),
    ],
)
def test_a_guide_explains_what_stands_on_a_page(page, head, verb):
    """The first cells of these tables are the words of the page, of which the code may hold the end as a variable."""
    code = "\n".join(path.read_text() for path in sorted((ROOT / "crosslayer/verbs" / verb).glob("*.py")))
    names = [name for row in rows(page, head) for name in re.split(", (?=KL)|; ", row[0])]
    assert len(names) >= 5
    missing = [name for name in names if name.removesuffix(" training text") not in code]
    assert not missing, missing


def test_what_a_command_of_methods_prints_is_on_the_page(monkeypatch, capsys):
    (shown,) = [block.body for block in blocks("docs/guides/convert.md") if block.kind == "text"]
    monkeypatch.setattr("sys.argv", ["crosslayer", "methods", "cla"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == ["…", "…"]


def test_pages_fit_with_enough_text():
    """To refit W_o and W_c of SmolLM2, whose W_o and W_c have 576 inputs each; as texts from the package have it."""
    amounts = [
        (page, int(windows), int(length))
        for page in PAGES
        if page != "docs/guides/store.md"  # a codec needs less
        for windows, length in re.findall(r"calibration[ =](\d+),? (?:--)?length[ =](\d+)", (ROOT / page).read_text())
    ]
    assert len(amounts) > 5
    for page, windows, length in amounts:
        sizes = [len(range(domain, windows, 3)) for domain in range(3)]
        assert is_enough(2 * 576, sizes, length, "refit"), (page, windows, length)


def test_the_attributes_of_a_diagnosis_on_its_page_exist():
    text = (DOCS / "guides" / "inspect.md").read_text()
    assert "`words`" not in text and set(re.findall(r"`(\w+)\(\)`", text)) <= set(dir(crosslayer.Diagnosis))

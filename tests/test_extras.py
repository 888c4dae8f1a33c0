"""What is said where an optional package is missing: a command that works in a clone, as no index has crosslayer."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.extras import check_extra, install
from crosslayer.models import embedded
from crosslayer.training.arguments import training_arguments
from crosslayer.verbs.heal.run import heal

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
WITHOUT = {"pyproject.toml", "tests/test_extras.py"}  # an extra of the package may name another; this test names both
UNPUBLISHED = re.compile(r"crosslayer\[|pip install (?:-\S+ )*'?crosslayer\b")


def tracked():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if name.endswith((".py", ".md", ".toml", ".yaml", "Makefile", ".ipynb"))]


def test_no_file_installs_a_package_that_is_not_published():
    wrong = [name for name in tracked() if name not in WITHOUT and UNPUBLISHED.search((ROOT / name).read_text())]
    assert not wrong, f"write {install('eval')}, in a clone; {', '.join(wrong)} cannot work"


def test_every_extra_that_is_named_is_declared():
    for name in tracked():
        text = (ROOT / name).read_text()
        named = re.findall(r"""(?:check_extra|install|remedy)\(\s*["']([\w-]+)""", text) if name.endswith(".py") else []
        named += [extra for group in re.findall(r"""['"]\.\[([\w,-]+)\]""", text) for extra in group.split(",")]
        assert set(named) - {"nothing"} <= EXTRAS.keys(), name


@pytest.fixture
def bare(monkeypatch):
    """An environment with the core packages alone."""
    found = importlib.util.find_spec
    missing = {"datasets", "pyarrow", "accelerate", "gguf", "peft"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in missing else found(name, *rest)
    )


@pytest.mark.parametrize(
    ("extra", "missing", "call"),
    [
        ("train", "datasets", lambda folder: load_documents(TextSource("some/set"))),
        ("train", "pyarrow", lambda folder: load_documents(TextSource(str(folder / "a.parquet")))),
        ("train", "accelerate", lambda folder: training_arguments(folder, 0, {})),
        ("demo", "accelerate, gguf", lambda folder: embedded.embedded_folder("smollm2")),
        ("heal", "peft", lambda folder: heal([], "heal-smoke", folder, settings=["stages.0.parameters=lora"])),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, bare, extra, missing, call):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError) as caught:
        call(tmp_path)
    assert missing in str(caught.value) and f"pip install '.[{extra}]'" in str(caught.value)


def test_what_is_installed_is_not_refused():
    check_extra("nothing", "a test", "torch", "transformers")
    assert install() == "pip install ."

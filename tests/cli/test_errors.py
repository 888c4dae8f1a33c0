"""Errors of the command line: the exit status says who can fix it, and there is one line."""

import io
import json
import resource
import sys
import warnings

import pytest
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from crosslayer import cli
from crosslayer.cli.errors import INTERNAL_ERROR, USER_ERROR, explain
from crosslayer.training.trainer import TrainingStopped
from tests.cli.test_cli import run
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny Llama with a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny("llama", dtype=torch.float32, vocab_size=len(WORDS), num_hidden_layers=4).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(" ".join(f"w{i * i % 499}" for i in range(4000)))
    return folder


class Schema(BaseModel):
    """Stands for a record."""

    share: float


def schema_error():
    try:
        Schema.model_validate({"share": "much"})
    except ValidationError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\nlines"), USER_ERROR, "two lines"),
        (ValueError("a \x1b[31mred\x1b[0m name"), USER_ERROR, "a \\x1b[31mred\\x1b[0m name"),
        (ValueError(), USER_ERROR, "ValueError"),
        (OSError(28, "No space left on device"), USER_ERROR, "No space left on device"),
        (PermissionError(13, "Permission denied", "/a/b"), USER_ERROR, "'/a/b': Permission denied"),
        (MemoryError(), USER_ERROR, "out of memory; use fewer or shorter sequences"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), USER_ERROR, "out of memory; use fewer"),
        (
            SafetensorError("I/O error: No space left on device"),
            USER_ERROR,
            "weights could not be read or written: I/O error",
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), INTERNAL_ERROR, "RuntimeError: mat1 and mat2"),
        (KeyError("layers"), INTERNAL_ERROR, "internal error: KeyError: 'layers' (report it"),
        (schema_error(), INTERNAL_ERROR, "ValidationError"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_exit_status_and_line(error, status, line):
    result, text = explain(error)
    assert result == status and line in text and "\n" not in text


def test_an_internal_error_is_one_line_and_a_traceback_on_request(monkeypatch, capsys):
    def fail(**_):
        raise KeyError("layers")

    monkeypatch.setattr(cli, "app", fail)
    assert run(monkeypatch, "methods") == 70
    assert capsys.readouterr().err.count("\n") == 1
    assert run(monkeypatch, "methods", "--debug") == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_warning_is_one_line_without_its_source(monkeypatch, capsys):
    def warn(**_):
        warnings.simplefilter("default")
        warnings.warn("checkpoint-4 is passed over:\nit is changed", stacklevel=1)

    before = warnings.showwarning
    monkeypatch.setattr(cli, "app", warn)
    assert run(monkeypatch, "methods") == 0
    assert capsys.readouterr().err == "crosslayer: warning: checkpoint-4 is passed over: it is changed\n"
    assert warnings.showwarning is before


def test_a_full_disk_is_one_line(monkeypatch, inputs, tmp_path, capsys):
    words = ("--text", inputs / "text.txt", "--windows", 32, "--length", 16, "--compensation", "none")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # less than the weights
    try:
        out = tmp_path / "out"
        status = run(
            monkeypatch, "retrofit", inputs / "model", "--method", "cla", "--layers", "2-3", "--out", out, *words
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert status == 2 and lines == [f"crosslayer: error: {str(out)!r}: File too large"]
    assert not list(tmp_path.iterdir())


def test_a_terminal_that_has_only_ascii_gets_escapes(monkeypatch, inputs, tmp_path):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    words = ("--text", inputs / "text.txt", "--sequences", 2, "--length", 16, "--waiver", 5)
    assert run(monkeypatch, "intervene", inputs / "model", "--out", tmp_path / "é", *words) == 0
    terminal.flush()
    lines = terminal.buffer.getvalue().decode("ascii").splitlines()
    assert any(line.startswith("report: ") and "\\xe9" in line for line in lines)
    assert json.loads(lines[-1])["model"] == "model"


def test_training_that_ended_too_soon_has_a_status_of_its_own():
    stopped = TrainingStopped("the loss is nan at step 2", 2, None)
    assert explain(stopped) == (1, "the loss is nan at step 2; there is no checkpoint yet")


def test_without_a_command_it_prints_what_to_type(monkeypatch, capsys):
    assert run(monkeypatch) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  crosslayer ")]
    assert [words[1] for words in lines] == ["methods", "diagnose", "measure"]


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_a_package_for_another_torch_is_named(name):
    """transformers says only that it could not import a class; vLLM on a CPU, installed by its guide, ends so."""
    cause = RuntimeError(f"operator {name}::nms does not exist")
    try:
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'.") from cause
    except ModuleNotFoundError as error:
        status, line = explain(error)
    assert status == USER_ERROR and line.startswith(name) and line.endswith("torchvision torchaudio torchcodec")
    assert explain(ModuleNotFoundError("no module x"))[0] == INTERNAL_ERROR

"""The command line as a user meets it: a folder of results, or one line and exit status 2."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer

import crosslayer
from crosslayer import cli
from crosslayer.output.folder import locked_folder
from tests.cli.test_start import heeding
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny, tokens

KEYS = [
    "first_token_share",
    "entropy",
    "sink_rate",
    "top_importance",
    "value_norm_ratio",
    "hidden_norm_ratio",
    "mlp_l1_l2",
    "token_similarity",
    "value_spectrum",
    "map_similarity",
    "map_similarity_per_head",
    "map_similarity_without_first",
    "attention_io_similarity",
    "layer_io_similarity",
    "stream_norm",
]


def run(monkeypatch, *words):
    """Run the command line in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["crosslayer", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def test_diagnose_writes_a_whole_folder(monkeypatch, tmp_path, capsys):
    out = tmp_path / "results"
    assert run(monkeypatch, "diagnose", "minilm", "--sequences", 2, "--length", 64, "--out", out) == 0
    captured = capsys.readouterr()
    headline = json.loads(captured.out.strip().splitlines()[-1])
    assert headline["model"] == "minilm" and f"report: {out / 'report.html'}\n" in captured.out
    assert "minilm: 2" in captured.err and "next: " not in captured.out  # an encoder has no cache to make smaller
    text = (out / "record.json").read_text()
    record = json.loads(text)
    crosslayer.Diagnosis.from_record(record)
    assert set(KEYS) <= set(record["measures"])
    for name, measure in record["measures"].items():
        assert len(measure["mean"]) == 6 and measure["n"] == 2 and len(measure["ci95"]) == 6, name
    assert record["position_table"]["outliers"][:2] == [0, 511]
    assert record["command"].startswith("crosslayer diagnose minilm")
    assert str(tmp_path) not in text  # no path of the machine
    page = (out / "report.html").read_text()
    assert "http://" not in page.split("<script>")[0] and "src=" not in page.split("<script>")[0]
    svgs = {path.stem for path in (out / "figures").iterdir()}
    assert {"map_similarity", "hidden_norms_by_position", "position_table"} <= svgs and len(svgs) == 23
    assert [p.name for p in tmp_path.iterdir()] == ["results"]

    assert run(monkeypatch, "diagnose", "minilm", "--out", out) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.slow  # draws all figures twice
def test_diagnose_replaces_a_folder(monkeypatch, tmp_path):
    words = ["diagnose", "minilm", "--length", 32, "--out", tmp_path / "out", "--sequences"]
    assert run(monkeypatch, *words, 2) == 0 and run(monkeypatch, *words, 1, "--force") == 0
    assert json.loads((tmp_path / "out/record.json").read_text())["measures"]["entropy"]["ci95"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_json_is_all_that_is_printed(monkeypatch, tmp_path, capsys):
    for words in (["plan", "minilm", "--out", tmp_path / "plan"], ["info"], ["methods"]):
        assert run(monkeypatch, *words, "--json") == 0
        assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert (tmp_path / "plan" / "report.html").is_file()


def test_a_folder_of_something_else_is_never_replaced(monkeypatch, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert run(monkeypatch, "diagnose", "minilm", "--out", tmp_path, "--force") == 2
    assert "by crosslayer" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_hostile_token_text_stays_text():
    record = crosslayer.diagnose(tiny("llama"), tokens()).record()
    record["top_tokens"][0][0]["token"] = record["model"]["name"] = "</script><script>alert(1)</script>"
    assert "<script>alert" not in crosslayer.Diagnosis.from_record(record).page()


@pytest.mark.slow  # a process of its own
def test_an_interrupt_leaves_nothing(tmp_path):
    tiny("llama", dtype=torch.float32, vocab_size=len(WORDS)).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("w1 " * 1000 * 16)
    words = [sys.executable, "-m", "crosslayer", "diagnose", tmp_path / "model", "--text", tmp_path / "text.txt"]
    words += ["--sequences", "1000", "--length", "16", "--out", tmp_path / "out"]
    process = heeding(words)
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if line.startswith("diagnosing model: "):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read().splitlines()
    assert process.wait(timeout=60) == 130 and rest[-1] == "crosslayer: interrupted, nothing is half-written"
    assert all(line.startswith("diagnosing model: ") for line in rest[:-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


def test_writing_is_all_or_nothing(tmp_path):
    from crosslayer.output.folder import whole_folder

    with pytest.raises(RuntimeError), whole_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_help_is_fast():
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "crosslayer", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "diagnose" in done.stdout
    assert time.perf_counter() - started < 20  # a few seconds when quiet: the imports of torch


def test_documents_name_only_options_that_exist():
    root = Path(__file__).parent.parent.parent
    verbs = typer.main.get_command(cli.app).commands.values()
    known = {word for verb in verbs for option in verb.params for word in (*option.opts, *option.secondary_opts)}
    for name in ("README.md", "docs/start/tour.md", "docs/guides/convert.md"):
        text = re.sub(r"python\s+benchmarks/[^`]*`", "", (root / name).read_text())  # scripts have options of their own
        named = set(re.findall(r"--[a-z]+[a-z-]*", text)) - {
            "--no-deps",
            "--lens",
            "--kv-cache-dtype",
        }  # of pip, and of vLLM
        assert len(named) > 5 and named <= known, (name, named - known)


def test_help_cuts_no_name_of_an_option_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for verb in cli.VERBS:
        assert run(monkeypatch, verb.command, "--help") == 0
        shown = set(re.findall(r"--[a-z0-9-]+(?= )", capsys.readouterr().out))
        names = {name for option in verb.options for name in option.flag.split("/")}
        assert names <= shown, (verb.command, names - shown)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["generate", "smollm2", "The", "--kv_bits", "4"], "--kv_bits; did you mean --kv-bits?"),
        (["bench", "a", "b", "--repeat", "3"], "--repeat; did you mean --repeats?"),
        (
            ["generate", "smollm2", "The", "--evict", "h2o:0.4"],
            "--evict; it is an option of needles, bench and evaluate",
        ),
        (["plan", "smollm2", "--nothing-like-it"], "--nothing-like-it"),
    ],
)
def test_an_unknown_option_names_what_is_near(monkeypatch, capsys, words, expected):
    assert run(monkeypatch, *words) == 2
    assert capsys.readouterr().err == f"crosslayer: error: No such option: {expected}\n"


NEEDED = {  # the words of commands that need others than a model
    "bench": "model --baseline other",
    "compare": "--recipe smoke --methods vanilla",
    "evaluate": "model --tasks piqa",
    "export": "model --to hf",
    "heal": "retrofit --recipe heal-smoke",
    "intervene": "model --waiver 5",
    "train": "smoke",
}


SAVING = {verb.command: verb for verb in cli.VERBS if any(option.name == "out" for option in verb.options)}


@pytest.mark.parametrize("name", SAVING)
def test_a_folder_in_use_is_refused_before_anything_is_imported(monkeypatch, tmp_path, capsys, name):
    def imports(name):
        raise AssertionError(f"{name} was imported first")

    monkeypatch.setattr("crosslayer.cli.command.import_module", imports)
    words = [name, *NEEDED.get(name, "model").split(), "--out", str(tmp_path / "out")]
    with locked_folder(tmp_path / "out"):
        assert run(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert f"(process {os.getpid()})" in said and said.count("\n") == 1
    (tmp_path / "out").mkdir()
    if SAVING[name].is_saved:
        assert run(monkeypatch, *words) == 2
        assert "--force" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

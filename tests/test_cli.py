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
import typer

from crosslayer import cli
from crosslayer.report.record import DiagnosisRecord
from tests.tiny import tiny

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
    assert headline["report"] == str(out / "report.html")
    assert "diagnosing: 2 of 2" in captured.err
    text = (out / "record.json").read_text()
    record = json.loads(text)
    DiagnosisRecord.model_validate(record)
    assert set(KEYS) <= set(record["measures"])
    for name, measure in record["measures"].items():
        assert len(measure["mean"]) == 6 and measure["n"] == 2 and len(measure["ci95"]) == 6, name
    assert record["position_table"]["outliers"][:2] == [0, 511]
    assert record["settings"]["command"].startswith("crosslayer diagnose minilm")
    assert str(tmp_path) not in text  # no path of the machine
    page = (out / "report.html").read_text()
    assert "http://" not in page.split("<script>")[0] and "src=" not in page.split("<script>")[0]
    svgs = {path.stem for path in (out / "figures").iterdir()}
    assert {"map_similarity", "importance_by_position", "position_table"} <= svgs and len(svgs) == 16
    assert [p.name for p in tmp_path.iterdir()] == ["results"]

    assert run(monkeypatch, "diagnose", "minilm", "--out", out) == 2
    assert "exists; give another name, or --force" in capsys.readouterr().err
    assert run(monkeypatch, "diagnose", "minilm", "--sequences", 1, "--length", 32, "--out", out, "--force") == 0
    assert json.loads((out / "record.json").read_text())["measures"]["entropy"]["ci95"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["results"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody/nothing"], "there is no folder 'nobody/nothing', and the Hugging Face hub cannot be reached"),
        (["minilm", "--length", "513"], "length 513 is above the model's 512 positions"),
        (["minilm", "--length", "1"], "'--length': Input should be greater than or equal to 2"),
        (["minilm", "--sequences", "0"], "'--sequences': Input should be greater than or equal to 1"),
        (["minilm", "--bos", "maybe"], "use auto, yes or no"),
        (["minilm", "--dtype", "int3"], "is not known; use one of float32"),
        (["minilm", "--device", "abacus"], "abacus"),
        (["minilm", "--text", "missing.txt"], "does not exist"),
        (["minilm", "--out", "pyproject.toml"], "is a file"),
        (["minilm", "--out", "/proc/nothing/here"], "cannot be written"),
        (["minilm", "--colour"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_status_2(monkeypatch, tmp_path, capsys, words, message):
    if "--out" not in words:
        words = [*words, "--out", str(tmp_path / "out")]
    assert run(monkeypatch, "diagnose", *words) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("loading")]
    assert len(lines) == 1 and lines[0].startswith("crosslayer: error: ") and message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_never_replaced(monkeypatch, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert run(monkeypatch, "diagnose", "minilm", "--out", tmp_path, "--force") == 2
    assert "holds more than crosslayer wrote" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_short_text_says_how_many_tokens_there_are(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("word " * 100)
    assert run(monkeypatch, "diagnose", "minilm", "--text", tmp_path / "a.txt", "--out", tmp_path / "out") == 2
    assert "the text has 100 tokens; 8 sequences of 512 need 4080" in capsys.readouterr().err


def test_a_model_that_cannot_be_probed_is_named(monkeypatch, tmp_path, capsys):
    from crosslayer import load_model

    _, tokenizer = load_model("minilm")
    tiny("bloom", n_head=4, n_layer=3, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ["diagnose", tmp_path / "model", "--length", 32, "--out", tmp_path / "out"]
    assert run(monkeypatch, *words) == 2
    assert "BloomForCausalLM (bloom) computes its attention itself" in capsys.readouterr().err


def test_hostile_token_text_stays_text(tmp_path):
    import crosslayer
    from crosslayer.report.write import write_diagnosis
    from tests.tiny import tokens

    record = crosslayer.diagnose(tiny("llama"), tokens()).record()
    record["top_tokens"][0][0]["token"] = record["settings"]["model"] = "</script><script>alert(1)</script>"
    page, _ = write_diagnosis(record, tmp_path / "out")
    assert "<script>alert" not in page.read_text()


def test_an_interrupt_leaves_nothing(tmp_path):
    out = tmp_path / "out"
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have it ignored
    code += "from crosslayer.cli import main; main()"
    words = ["diagnose", "minilm", "--sequences", "2000", "--length", "32", "--out", str(out)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("diagnosing: 1"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 130 and "interrupted, nothing was written" in rest
    assert not list(tmp_path.iterdir())


def test_writing_is_all_or_nothing(tmp_path):
    from crosslayer.report.record import whole_folder

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
    root = Path(__file__).parent.parent
    verbs = typer.main.get_command(cli.app).commands.values()
    known = {word for verb in verbs for option in verb.params for word in (*option.opts, *option.secondary_opts)}
    for name in ("README.md", "docs/RETROFIT.md"):
        named = set(re.findall(r"--[a-z]+[a-z-]*", (root / name).read_text())) - {"--no-deps", "--lens"}
        assert len(named) > 5 and named <= known, (name, named - known)

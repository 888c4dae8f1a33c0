"""`crosslayer retrofit` as a user meets it: a folder that opens, a report, one-line errors, no half folders."""

import json
import random
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import crosslayer
from crosslayer.core.methods import allow_methods
from crosslayer.judge.report import Against
from crosslayer.output.manifest import check_files
from crosslayer.verbs.retrofit.result import RetrofitReport
from crosslayer.verbs.verify.run import check_manifest
from tests.cli.test_cli import run
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny

QUICK = ("--windows", 32, "--length", 16)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny Llama of 8 layers with a tokenizer, and a text with enough windows."""
    folder = tmp_path_factory.mktemp("inputs")
    model = tiny("llama", dtype=torch.float32, vocab_size=len(WORDS), num_hidden_layers=8)
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    generator = random.Random(0)
    documents = [" ".join(f"w{generator.randrange(500)}" for _ in range(900)) for _ in range(4)]
    (folder / "text.txt").write_text("\n<|doc|>\n".join(documents))
    return folder


def retrofit(monkeypatch, inputs, out, *words):
    return run(
        monkeypatch, "retrofit", inputs / "model", "--text", inputs / "text.txt", "--out", out, *QUICK, *map(str, words)
    )


def test_the_folder_is_whole_with_report_and_card(monkeypatch, inputs, tmp_path, capsys):
    out = tmp_path / "out"
    assert retrofit(monkeypatch, inputs, out, "--method", "uniattn", "--layers", "4-5,6-7") == 0
    captured = capsys.readouterr()
    line = json.loads(captured.out.strip().splitlines()[-1])
    keys = (
        "method layers kv_share read_share worst_domain seen perplexity_before perplexity_after perplexity_ratio_ci95 "
        "kl needles seconds"
    )
    assert list(line) == keys.split()
    assert (line["method"], line["layers"], line["kv_share"]) == ("uniattn", [5, 7], 0.875)
    assert "conditional on" in captured.out
    assert "other text" in captured.out
    text = (out / "record.json").read_text()
    report = RetrofitReport.from_record(json.loads(text))
    assert [fit.layer for fit in report.calibration.layers] == [5, 7] and str(tmp_path) not in text
    assert report.of("KL").n == 32 and report.domains == ("text.txt",) and set(report.fitted) == {"text.txt"}
    assert report.command.startswith("crosslayer retrofit model --text text.txt")
    assert {p.name for p in out.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "manifest.json",
        "README.md",
        "report.html",
        "record.json",
        "figures",
    }
    assert check_files(out) == []
    card = (out / "README.md").read_text()
    assert "--text text.txt" in card and "conditional on" in card


SEVERAL = [
    {"name": "uniattn", "superblocks": [[4, 5, 6]], "compensation": "attention"},
    {"name": "drop", "attention": [2], "compensation": "attention"},
]


def test_several_methods_in_one_retrofit(monkeypatch, inputs, tmp_path, capsys):
    assert retrofit(monkeypatch, inputs, tmp_path / "out", "--method", json.dumps(SEVERAL)) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (line["method"], line["layers"]) == ("uniattn+drop", [2, 5, 6])
    report = RetrofitReport.from_record(json.loads((tmp_path / "out" / "record.json").read_text()))
    assert [fit.layer for fit in report.calibration.layers] == [2, 5, 6] and report.calibration.fit == "refit"
    assert len(report.weights.refitted) == 2  # W_o of the readers
    for entries, message in (
        ([SEVERAL[0], {"name": "cla", "groups": [[5, 6]]}], "layer 6: uniattn reads keys of layer 4 and cla of"),
        ([SEVERAL[0], {"name": "shared_choice"}], "must be one method"),
        ([SEVERAL[0], {"name": "cal"}], "did you mean 'cla'"),
    ):
        monkeypatch.setattr("crosslayer.verbs.retrofit.run.ready_model", lambda *args, **options: 1 / 0)
        assert retrofit(monkeypatch, inputs, tmp_path / "no", "--method", json.dumps(entries)) == 2
        (error,) = capsys.readouterr().err.strip().splitlines()[-1:]
        assert message in error


OPENED = """
import sys, torch
from transformers import AutoModelForCausalLM as A

stock, ours, again = sys.argv[1:]
model = A.from_pretrained(stock)
print(type(model).__name__, len(model.model.layers), "crosslayer" in sys.modules)
import crosslayer
for folder in (ours, again):
    model = A.from_pretrained(folder)
    model.save_pretrained(again)
    print(type(model).__name__, model.config.plan.keys, model(torch.tensor([[5, 6, 7]])).logits.sum().item())
"""


@pytest.mark.slow  # a process of its own
def test_folders_open_in_another_process(monkeypatch, inputs, tmp_path):
    """Whole layers need no package; with it a model of ours loads, saves, and loads again."""
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    options = ("--method", "drop", "--part", "layer", "--layers", "auto", "--count", 2)
    assert retrofit(monkeypatch, inputs, stock, *options) == 0
    assert check_files(stock) == []
    assert retrofit(monkeypatch, inputs, ours, "--method", "cla", "--layers", "6-7") == 0
    folders = [str(folder) for folder in (stock, ours, tmp_path / "again")]
    found = subprocess.run([sys.executable, "-c", OPENED, *folders], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-500:]
    lines = found.stdout.strip().split("\n")
    assert lines[0] == "LlamaForCausalLM 6 False"
    assert lines[1] == lines[2] and lines[1].startswith("CrossLayerForCausalLM (0, 1, 2, 3, 4, 5, 6, 6)")


def test_the_worst_unseen_domain_leads(monkeypatch, inputs, tmp_path, capsys):
    """Two evaluation texts, one of them and a third calibrated on: the report marks which, and says where W_c helps."""
    generator = random.Random(1)
    for name, words in (("other", range(300, 500)), ("third", range(100))):
        documents = [" ".join(f"w{generator.choice(words)}" for _ in range(900)) for _ in range(3)]
        (inputs / f"{name}.txt").write_text("\n<|doc|>\n".join(documents))
    out, fitted = tmp_path / "out", ("text.txt", "third.txt")
    options = ["--text", inputs / "other.txt"]
    for name in fitted:
        options += ["--calibration-text", inputs / name]
    assert retrofit(monkeypatch, inputs, out, "--method", "cla", "--layers", "4-7", *options) == 0
    captured = capsys.readouterr().out
    record = json.loads((out / "record.json").read_text())
    report = RetrofitReport.from_record(record)
    assert report.domains == ("other.txt", "text.txt") and report.of("KL", "other.txt").n == 16
    assert "text.txt" in report.fitted and "other.txt" not in report.fitted
    assert record["calibration"]["windows"] == {"text.txt": 64, "third.txt": 64}
    gain = report.row("retrofit", "KL", "other.txt", Against.UNFITTED)
    without = report.row("without the fit", "KL", "other.txt")
    assert gain.change.value == pytest.approx(report.of("KL", "other.txt").value - without.value, rel=1e-9)
    assert "(other.txt)" in captured
    assert "unseen other.txt" in captured and "; calibration text.txt" in captured
    assert "Fitting W_o and " in captured and "other text was not measured" not in captured
    assert json.loads(captured.strip().splitlines()[-1])["worst_domain"] == "other.txt"
    assert all(0 < fit["left_out"] < 10 for fit in record["calibration"]["layers"])


def test_by_default_three_embedded_domains_calibrate_and_six_evaluate(monkeypatch, inputs, tmp_path):
    words = ("--method", "cla", "--layers", "6-7", "--compensation", "lstsq", "--windows", 96, "--length", 8)
    assert run(monkeypatch, "retrofit", inputs / "model", "--out", tmp_path / "out", *map(str, words)) == 0
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    seen = {domain: domain in record["fitted"] for domain in RetrofitReport.from_record(record).domains}
    assert seen == {"science": False, "speeches": False, "code": False, "books": True, "web": True, "docs": True}
    assert list(record["calibration"]["windows"].values()) == [43, 43, 42]


WAYS = [
    ("--method", "cla", "--layers", "auto", "--compensation", "ridge"),
    ("--method", "drop", "--layers", "auto", "--count", 2, "--compensation", "lstsq"),
    ("--method", "cla", "--layers", "auto", "--count", 2),
    ("--method", "cla", "--layers", "0-7", "--compensation", "lstsq"),
    ("--method", "drop", "--layers", "2,5", "--part", "mlp"),
    ("--method", '{"name": "cla", "group": 2, "compensation": "attention"}'),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("words", [("--method", "uniattn"), ("--method", "drop", "--part", "layer")], ids=str)
def test_the_folder_keeps_the_dtype_of_the_original_and_what_was_measured(monkeypatch, inputs, tmp_path, dtype, words):
    original, out = tmp_path / "original", tmp_path / "out"
    model = tiny("llama", dtype=dtype, vocab_size=len(WORDS), num_hidden_layers=8)
    model.save_pretrained(original)
    tokenizer().save_pretrained(original)
    more = ("--text", inputs / "text.txt", "--out", out, "--layers", "6-7", *QUICK)
    assert run(monkeypatch, "retrofit", original, *words, *more, "--device", "cpu") == 0
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    checks = {check.name: check for check in check_manifest(crosslayer.load_model(str(out), device="cpu")[0], out)}
    assert checks["manifest: fingerprint"].difference == 0  # the saved weights are those that were measured


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_other_ways(monkeypatch, inputs, tmp_path, options):
    assert retrofit(monkeypatch, inputs, tmp_path / "out", *options, "--windows", 16) == 0
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["settings"]["compensation"] in (None, record["calibration"]["fit"])
    AutoTokenizer.from_pretrained(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").generate(torch.tensor([[5, 6]]), max_new_tokens=3)


def test_a_budget_is_met_and_its_curve_stands_in_the_report(monkeypatch, inputs, tmp_path, capsys):
    out = tmp_path / "out"
    assert retrofit(monkeypatch, inputs, out, "--kv-budget", 0.7, "--compensation", "none", "--length", 8) == 0
    output = capsys.readouterr()
    assert json.loads(output.out.strip().splitlines()[-1])["kv_share"] <= 0.7
    assert "300 configurations" in output.err
    record = json.loads((out / "record.json").read_text())
    assert record["judged"] == record["fitted"] == ["text.txt"]
    search = record["choice"]["search"]
    assert search["passes"] <= 300 and search["curve"][-1]["share"] <= 0.7
    compared = [row for row in search["baselines"] if row["against"] == Against.SEARCHED]
    assert [row["change"]["n"] for row in compared] == [16, 16]
    assert record["windows"]["search"] == {"text.txt": [32, 2]}  # first and count
    assert [row["candidate"] for row in compared] == ["cla", "uniattn"]
    assert (out / "figures" / "trade_off.svg").is_file()


def test_a_method_of_ones_own(monkeypatch, inputs, tmp_path, capsys):
    """A module that is allowed, named as in Python: its plan is applied, and the report names it."""
    (tmp_path / "every_third.py").write_text(
        "from dataclasses import dataclass\n"
        "from crosslayer.core.method import Method\n"
        "from crosslayer.core.methods.cla import CLA\n\n\n"
        "@dataclass(frozen=True)\n"
        "class EveryThird(Method):\n"
        "    def plan(self, layers):\n"
        "        return CLA(group=3).plan(layers)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    allow_methods("every_third")
    out = tmp_path / "out"
    assert retrofit(monkeypatch, inputs, out, "--method", "every_third") == 0
    record = json.loads((out / "record.json").read_text())
    assert record["methods"] == [{"name": "every_third"}] and record["plan"]["keys"] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert record["calibration"]["fit"] == "none" and record["choice"]["how"] == "as options"
    assert record["fitted"] == []
    printed = capsys.readouterr().out
    report = crosslayer.load_result(out)
    ratio = max(report.of("perplexity", domain).value for domain in report.domains)
    first = printed.partition("\n")[0]
    assert "38%" in first and f"×{ratio:.2f}" in first
    assert "\nevery_third: KV cache 37.50%" in printed


BAD = [
    (("--method", "uniattn", "--layers", "6-9"), "'6-9' is out of range; layers go from 0 to 7"),
    (("--method", "uniatn"), "method 'uniatn' is not known; did you mean 'uniattn'?"),
    (("--method", "{'name': 'cla'}"), "--method must be a name, a JSON object or a list, got "),
    (("--method", '{"name": "cla", "group": 2}', "--compensation", "ridge"), "--compensation ridge has no effect"),
    (("--method", '{"name": "cla", "group": 2}', "--layers", "4-5"), "--layers 4-5 has no effect"),
    (("--method", "cla", "--kv-context", 1), "--kv-context must be greater than or equal to 2"),
    (("--method", "cla", "--kv-budget", 0.8), "remove it, or --method cla"),
    ((), "give one of --method, --kv-budget, --kl-budget and --read-budget"),
    (("--kv-budget", 0.01, "--calibration", 16), "--kv-budget must be from 0.1250 (one of 8 layers) to 1, got 0.01"),
    (("--method", "cla", "--windows", 15), "--windows must be at least 16 (16 of each domain), got 15"),
    (("--kv-budget", 0.7, "--calibration", 2), "--calibration must be at least 9 (refit fits 64 inputs"),
    (("--method", "uniattn", "--calibration", 2), "--calibration must be at least 9 (refit fits 64 inputs"),
    (("--method", "cla", "--compensation", "none", "--calibration", 64), "--calibration 64 has no effect"),
    (("--method", "cla", "--compensation", "none", "--layers", "6-7", "--calibration-text", "TEXT"),
     "--calibration-text has no effect"),
    (("--method", "uniattn", "--calibration", 9999), "are needed (32 for evaluation, 9999 for calibration)"),
    (("--method", "drop", "--part", "mlp", "--layers", "1", "--compensation", "ridge"), "needs at least one layer"),
    (("--method", "cla", "--layers", "auto:top-half-similarity"), "auto must be one of 'similarity', got 'top-half"),
    (("--method", "cla", "--compensation", "none", "--groups", 2), "--groups 2 has no effect"),
    (("--method", "uniattn", "--layers", "1,2,4-5"), "at least two layers, got [[1], [2]]"),
    (("--method", "drop", "--layers", "auto", "--count", 8), "--count must be below 8, the number of layers"),
    (("--method", "cla", "--target", "head"), "target must be one of 'attention', 'heads', 'mlp'"),
    (("--kv-budget", 70), "--kv-budget must be less than 1, got 70"),
    (("--kl-budget", "1e-9", "--compensation", "none", "--length", 8), "--kl-budget 1e-09 is too small"),
    (("--method", '{"name": ' + "[" * 50_000), "recursion"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda option: str(option)[:60])
def test_bad_input_is_one_line(monkeypatch, inputs, tmp_path, capsys, options, message):
    options = [inputs / "text.txt" if option == "TEXT" else option for option in options]
    assert retrofit(monkeypatch, inputs, tmp_path / "out", *options) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("crosslayer: error: ") and message in lines[0]
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [("llama", "--calibration must be at least 9 (refit fits 64 inputs"), ("gpt2", "'gpt2' cannot be converted")],
)
def test_what_the_config_rules_out_is_refused_before_weights_are_read(
    monkeypatch, inputs, tmp_path, capsys, kind, message
):
    tiny(kind).config.save_pretrained(tmp_path / "model")  # no weights
    words = ("--text", inputs / "text.txt", "--method", "uniattn", "--calibration", "2", "--out", tmp_path / "out")
    assert run(monkeypatch, "retrofit", tmp_path / "model", *words, *QUICK) == 2
    assert message in capsys.readouterr().err


def test_an_existing_folder_is_kept_and_force_replaces_only_ours(monkeypatch, inputs, tmp_path, capsys):
    out = tmp_path / "out"
    options = ("--method", "cla", "--layers", "6-7", "--compensation", "none")
    assert retrofit(monkeypatch, inputs, out, *options) == 0
    assert retrofit(monkeypatch, inputs, out, *options) == 2
    assert "--force" in capsys.readouterr().err
    assert retrofit(monkeypatch, inputs, out, *options, "--force") == 0
    (out / "notes.txt").write_text("mine")
    assert retrofit(monkeypatch, inputs, out, *options, "--force") == 2
    assert (out / "notes.txt").read_text() == "mine"


def test_families_that_cannot_be_converted_say_which_can(monkeypatch, inputs, tmp_path, capsys):
    tiny("gpt2", dtype=torch.float32, vocab_size=len(WORDS)).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    options = ("--method", "cla", "--text", inputs / "text.txt", *QUICK)
    assert run(monkeypatch, "retrofit", tmp_path / "model", "--out", tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    named = (
        "'gpt2' cannot be converted",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "diagnose",
    )
    assert all(name in error for name in named), error


KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace

import torch

from crosslayer.cli import main
from crosslayer.output import result
from crosslayer.verbs.retrofit import run  # and with them all that a child would have to import

torch.set_num_threads(1)  # threads do not survive a fork
drawn = SimpleNamespace(vegalite_to_svg=lambda *_, **__: "<svg/>", javascript_bundle=lambda *_, **__: "")
sys.modules["vl_convert"] = drawn  # draws each figure in seconds
whole, runs, home, left = result.whole_folder, int(sys.argv.pop()), os.getpid(), 10**6


def step(event, _):
    global left
    if event == "open" or event.startswith(("os.", "shutil.")):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(out, *rest):
    global left
    steps, codes = out.with_name("steps"), []
    for number in range(runs + 1):
        left = 10**6 if number == 0 else max(1, round(int(steps.read_text()) * (number - 1) / (runs - 1)))
        child = os.fork()
        if child == 0:
            sys.addaudithook(step)
            return whole(out.with_name(f"out{number}"), *rest)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    out.with_name("codes").write_text(str(codes))
    os._exit(0)


result.whole_folder = forked
try:
    main()
finally:
    if os.getpid() != home:
        Path(sys.argv[-1]).with_name("steps").write_text(str(10**6 - left))
"""


@pytest.mark.slow  # a process that forks four times; tests/output/test_folder.py kills every day
def test_killed_at_any_step_of_writing_it_leaves_a_whole_folder_or_none(inputs, tmp_path):
    """One process forks where it begins to write: one child finishes; three die, at its first, middle and last step.

    A step is a file opened or the file system changed, so that every run dies where it should on every machine.
    """
    words = ["retrofit", inputs / "model", "--text", inputs / "text.txt", "--method", "cla", "--layers", "6-7", *QUICK]
    command = [sys.executable, "-c", KILLED, *words, "--compensation", "none", "--out", tmp_path / "out", 3]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-500:]
    assert json.loads((tmp_path / "codes").read_text()) == [0, *[-signal.SIGKILL] * 3]
    exist = [(tmp_path / f"out{number}").exists() for number in range(4)]
    assert exist[0] and not exist[1] and exist[3], exist  # finished; died before and after the folder was there
    assert exist[1:] == sorted(exist[1:]), exist
    for number in range(4):
        if exist[number]:
            assert check_files(tmp_path / f"out{number}") == []
            AutoModelForCausalLM.from_pretrained(tmp_path / f"out{number}")

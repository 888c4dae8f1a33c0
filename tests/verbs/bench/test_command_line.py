"""`crosslayer bench`: its lines and its folder."""

import json

from crosslayer import load_model
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.bench.result import Benchmark
from tests.cli.test_cli import run


def saved(folder, model):
    """Save a tiny model with a tokenizer, so that the command line can load it."""
    load_model("minilm")[1].save_pretrained(folder)
    model.float().save_pretrained(folder)
    return folder


def test_the_command_line(monkeypatch, tmp_path, capsys):
    ours = saved(tmp_path / "ours", build(config_of([{"name": "cla", "group": 2}])))
    plain = saved(tmp_path / "plain", build(config_of([])))
    words = ["bench", ours, "--baseline", plain, "--contexts", "6,12", "--new-tokens", 2, "--repeats", 3]
    assert run(monkeypatch, *words, "--out", tmp_path / "out", "--device", "cpu") == 0
    captured = capsys.readouterr()
    last = json.loads(captured.out.strip().splitlines()[-1])
    assert (last["candidates"], last["original"]) == (["ours"], "plain")
    shares = {row["scope"]: row["change"] for row in last["rows"] if row["quantity"] == "bytes"}
    assert shares == {"context 6, batch 1, sdpa": 0.5, "context 12, batch 1, sdpa": 0.5}
    assert "benchmarking: 8 of 8" in captured.err and "KV cache: 50.0%" in captured.out
    benchmark = Benchmark.from_record(json.loads((tmp_path / "out" / "record.json").read_text()))
    assert benchmark.command.startswith("crosslayer bench ours --baseline plain") and benchmark.headline() == last
    assert str(tmp_path) not in (tmp_path / "out" / "record.json").read_text()
    assert "against plain" in (tmp_path / "out" / "report.html").read_text()

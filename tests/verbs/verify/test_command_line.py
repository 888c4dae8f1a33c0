"""`crosslayer verify`: its lines, its folder and its exit status."""

import json

import pytest

from crosslayer.verbs.verify.checks import CHECKS
from crosslayer.verbs.verify.result import Verification
from tests.cli.test_cli import run
from tests.helpers.saved import ours, save
from tests.helpers.verifications import only


@pytest.fixture
def saved(tmp_path):
    return save(ours("svformer"), tmp_path / "model")


def test_a_saved_folder_passes_and_its_record_is_written(monkeypatch, saved, tmp_path, capsys):
    names = [name for name in CHECKS if name != "compiled"]  # inductor takes long
    only(monkeypatch, *names)
    assert run(monkeypatch, "verify", saved, "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    headline = json.loads(out.strip().splitlines()[-1])
    assert headline["model"] == "model" and headline["failed"] == headline["not_applicable"] == 0
    assert headline["passed"] == 3 + 2 * len(names) and "PASS" in out
    text = (tmp_path / "out" / "record.json").read_text()
    record = Verification.from_record(json.loads(text))
    assert len(record.checks) == headline["passed"] and str(tmp_path) not in text
    assert record.headline() == headline and record.command.startswith("crosslayer verify model --out out")
    assert f"All {headline['passed']} applicable checks passed." in (tmp_path / "out" / "report.html").read_text()
    assert run(monkeypatch, "verify", saved, "--out", tmp_path / "out") == 2


def test_the_check_that_runs_is_on_the_screen(monkeypatch, saved, capsys):
    only(monkeypatch, "cache bytes", "save and load")
    assert run(monkeypatch, "verify", saved, "--dtypes", "float32") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("verifying")]
    assert [line.split("; now ")[1:] for line in lines] == [
        [], ["manifest and plain pass"], ["save and load, float32"], ["cache bytes, float32"], [],
    ]  # fmt: skip

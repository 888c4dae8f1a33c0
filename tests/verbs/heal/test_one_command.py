"""`crosslayer retrofit --heal`: converted, measured, trained and measured again by a single command."""

import pytest

import crosslayer
from tests.cli.test_bad_input import type_in
from tests.helpers.recovery import original_in, recipe_in

STAGE = {"parameters": "all", "schedule": {"steps": 2}, "train": {"learning_rate": 1e-3}}


@pytest.fixture
def words(tmp_path):
    original = original_in(tmp_path)
    recipe = recipe_in(tmp_path, stages=[STAGE], objective="distill")
    options = ["--method", "drop", "--layers", "2", "--calibration", "64", "--windows", "96", "--length", "24"]
    return [*map(str, ("retrofit", original, "--out", tmp_path / "small", *options, "--heal", recipe))]


def test_a_retrofit_and_its_recovery_are_written(words, tmp_path, monkeypatch, capsys):
    assert type_in(monkeypatch, words) == 0
    report, recovery = (crosslayer.load_result(tmp_path / name) for name in ("small", "small-healed"))
    assert report.kv_share == 0.75 and [variant.name for variant in recovery.variants] == ["small"]
    assert recovery.variants[0].states[1].run.steps == 2
    model, _ = crosslayer.load_model(str(tmp_path / "small-healed" / "small" / "model"))
    assert model.config.plan == report.plan
    printed = capsys.readouterr().out
    assert report.sentences()[0] in printed and recovery.sentences()[0] in printed


def test_errors_of_the_recipe_come_before_anything_is_loaded(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong.yaml").write_text("stages: []")
    assert type_in(monkeypatch, [*words[:-1], str(tmp_path / "wrong.yaml")]) == 2
    assert "wrong.yaml" in capsys.readouterr().err
    (tmp_path / "small-healed").mkdir()
    assert type_in(monkeypatch, words) == 2
    assert "'small-healed'" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()

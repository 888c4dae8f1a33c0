"""The evaluation windows: those of the report, without any calibration window."""

import json

import pytest
import torch

import crosslayer
from crosslayer.corpus.domains import embedded_domains
from crosslayer.models.load import load_model
from crosslayer.training.recipe import load_recipe
from crosslayer.verbs.heal.questions import evaluation_windows
from crosslayer.verbs.heal.retrofits import open_retrofits
from crosslayer.verbs.retrofit.result import RetrofitReport
from crosslayer.verbs.retrofit.run import strategy_of
from crosslayer.verbs.retrofit.texts import RetrofitTexts
from tests.helpers.recovery import healed, recipe_in

STAGE = {"parameters": "all", "schedule": {"steps": 1}}


def opened(base, *names):
    retrofits, original = open_retrofits([base / name for name in names], str(base / "original"))
    return retrofits, load_model(original)[1]


def judged(base, folder, evaluation, *names):
    recipe = load_recipe(recipe_in(folder, judge=evaluation))
    return evaluation_windows(recipe, *opened(base, *names))


def report_parts(base, name):
    """The windows of a report, cut as the retrofit cut them."""
    (retrofit,), tokenizer = opened(base, name)
    code = {"code": list(embedded_domains(["code"])["code"])}
    return RetrofitTexts(code, ("code",), ("code",)).windows(tokenizer, strategy_of(retrofit.report.settings))


def test_by_default_the_damage_before_training_is_the_reports_own(base, tmp_path):
    recipe = recipe_in(tmp_path, stages=[STAGE], judge={"held_out": 1}, baseline=False, seed=5)
    recovery = healed(base, "fitted", tmp_path, recipe)
    report = crosslayer.load_result(base / "fitted")
    assert isinstance(report, RetrofitReport)
    assert recovery.domains == ("code",) and (recovery.windows, recovery.length) == (16, 24)
    for quantity in ("KL", "perplexity", "changed tokens"):
        one, other = recovery.row("fitted, before", quantity, "code"), report.row("retrofit", quantity, "code")
        assert one.value == pytest.approx(other.value, rel=1e-5)
        ends = [(row.change.value, *row.change.interval) for row in (one, other)]
        assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_more_windows_leave_out_calibration_windows(base, tmp_path):
    parts = report_parts(base, "fitted")
    ids = judged(base, tmp_path, {"domains": ["code"], "windows": 64}, "fitted").ids
    fitted = {tuple(window) for window in parts["calibration"].ids.tolist()}
    assert ids.shape == (64, 24) and torch.equal(ids[:16], parts["evaluation"].ids)
    assert len(fitted) == 32 and not fitted & {tuple(window) for window in ids.tolist()}
    together = judged(base, tmp_path, {"domains": ["code"], "windows": 64}, "without", "fitted").ids
    assert torch.equal(together, ids)


def test_shorter_windows_begin_as_the_reports_and_longer_ones_are_refused(base, tmp_path):
    ids = judged(base, tmp_path, {"domains": ["code"], "windows": 64, "length": 20}, "fitted").ids
    assert torch.equal(ids, judged(base, tmp_path, {"domains": ["code"], "windows": 64}, "fitted").ids[:, :20])
    with pytest.raises(ValueError, match="judge.length.*24.*got 25"):
        judged(base, tmp_path, {"domains": ["code"], "windows": 16, "length": 25}, "fitted")
    assert judged(base, tmp_path, {"domains": ["code"], "windows": 16, "length": 25}, "without").ids.shape == (16, 25)


@pytest.mark.parametrize(
    ("option", "value", "evaluation", "message"),
    [
        ("seed", 1, {}, "the same seed, got 0 for .* and 1 for 'other'; heal them separately"),
        ("length", 32, {"length": 24}, "the same length, got 24 for .* and 32 for 'other'; heal them separately"),
        ("windows", 17, {}, "the same windows, got 16 for .* and 17 for 'other'; set judge.windows"),
        ("windows", 17, {"windows": 16}, None),
        ("judged", ["web"], {}, "the same domains, got code for .* and web for 'other'; set judge.domains"),
        ("judged", ["web"], {"domains": ["code"]}, None),
    ],
)
def test_retrofits_that_were_evaluated_differently_are_refused(option, value, evaluation, message, base, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in ("config.json", "model.safetensors"):
        (other / file).symlink_to(base / "without" / file)
    report = json.loads((base / "without" / "record.json").read_text())
    (report if option == "judged" else report["settings"])[option] = value
    for row in report["rows"] if option == "judged" else ():  # a report has the rows of its domains
        row["scope"] = value[0] if row["scope"] == "code" else row["scope"]
    (other / "record.json").write_text(json.dumps(report))
    retrofits, _ = open_retrofits([base / "without", other], str(base / "original"))
    recipe, tokenizer = load_recipe(recipe_in(tmp_path, judge=evaluation)), load_model(str(base / "original"))[1]
    if message is None:
        assert len(evaluation_windows(recipe, retrofits, tokenizer)) == 16
        return
    with pytest.raises(ValueError, match=message) as caught:
        evaluation_windows(recipe, retrofits, tokenizer)
    assert "\n" not in str(caught.value)


def test_a_text_of_your_own_needs_an_evaluation_domain(base, tmp_path):
    retrofits, tokenizer = opened(base, "without")
    report = retrofits[0].report.model_copy(update={"judged": ["own.txt"]})
    own = type(retrofits[0])(retrofits[0].folder, report)
    with pytest.raises(ValueError, match="'without'.*'own.txt', .*judge.domains"):
        evaluation_windows(load_recipe(recipe_in(tmp_path, judge={})), [own], tokenizer)


def test_windows_of_a_training_and_calibration_domain_are_marked(base, tmp_path):
    """Held-out training text may be calibration text."""
    data = {"length": 32, "domains": [{"name": "code"}]}
    evaluation = {"domains": ["code"], "windows": 16, "held_out": 1}
    recipe = recipe_in(tmp_path, stages=[STAGE], judge=evaluation, baseline=False, data=data)
    for name, label in (("fitted", "seen, may overlap calibration text"), ("without", "seen")):
        recovery = healed(base, name, tmp_path / name, recipe)
        assert f"on code ({label})" in recovery.page()
        assert f"on code ({label})" in recovery.sentences()[0]

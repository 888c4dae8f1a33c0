"""An oracle finds every needle, random weights none; results come back equal, and every refusal is a line."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

import crosslayer
from crosslayer.models.pair import Loadable
from tests.cli.test_cli import run
from tests.helpers.browser import complaints, resize
from tests.helpers.tiny import tiny
from tests.output.test_page import LOOK, opened
from tests.verbs.needles.oracle import TOKENIZER, oracle, random_model

verb = importlib.import_module("crosslayer.verbs.needles.run")
SMALL = {"lengths": [512, 768], "depths": [0, 50, 100], "keys": 3, "samples": 3, "new_tokens": 16}


def found(model, **options):
    return crosslayer.needles(model, TOKENIZER, **{**SMALL, **options})


@pytest.fixture(scope="module")
def compared():
    return found(random_model(torch.float32), baseline=oracle())


def test_an_oracle_finds_all_and_random_weights_nothing(compared):
    assert [[compared.score(model, *cell).value for cell in compared.settings.cells] for model in (0, 1)] == [
        [0] * 6,
        [1] * 6,
    ]
    assert [row.scope for row in compared.rows] == ["all", "512 tokens", "768 tokens"]
    for row, count in zip(compared.rows, (18, 9, 9), strict=True):
        assert (row.value, row.original, row.details["samples"]) == (0, 1, count)
        assert (row.change.n, row.change.value, row.change.verdict) == (count, -1, "lower")
    right = zip(compared.questions, compared.answers[1], strict=True)
    assert all(question.value in answer for question, answer in right)


def test_what_strays_to_another_key_is_counted():
    result = found(oracle(stray=True), lengths=[512])
    assert [(row.value, row.details["samples"]) for row in result.rows] == [(0, 9)] * 2 and result.strayed == 9
    assert "candidate's answers" in result.sentences()[1]
    alone = found(oracle(), lengths=[512], keys=1)
    assert alone.rows[0].value == 1 and not any("another key" in line for line in alone.sentences())


def test_weights_with_nan_are_refused_and_score_no_zero():
    broken = random_model(torch.float32)
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        found(broken, lengths=[512])


def test_the_samples_are_the_same_whatever_else_is_asked():
    both, one = found(oracle()), found(oracle(), lengths=[768], depths=[50], batch=1)
    assert one.questions == tuple(asked for asked in both.questions if (asked.length, asked.depth) == (768, 50))
    assert found(oracle(), seed=1).questions != both.questions


def test_a_baseline_that_finds_nothing_is_said_to(compared):
    swapped = found(oracle(), baseline=random_model(torch.float32))
    assert any("baseline itself" in line and "5%" in line for line in swapped.sentences())
    assert not any("baseline itself" in line for line in compared.sentences())
    assert "−100.0 (−100.0 to −" in " ".join(compared.sentences())


@pytest.mark.parametrize("beside", [True, False])
def test_the_result_comes_back_and_its_page_is_fit_to_see(compared, beside, tmp_path, browser):
    result = compared if beside else found(oracle(), lengths=[512], depths=[50])
    page = result.save(tmp_path / "out")
    assert crosslayer.load_result(tmp_path / "out") == result
    assert len(list((tmp_path / "out" / "figures").glob("scores_*.svg"))) == len(result.models)
    for width in (1280, 390):
        resize(browser, width)
        opened(browser, page)
        assert browser.execute_script(LOOK) == [] and complaints(browser) == []
        written = browser.execute_script(
            "return [...document.querySelectorAll('.figure .role-mark.mark-text text')].map(text => text.textContent)"
        )
        assert sorted(written, key=int) == sorted(
            f"{100 * result.score(number, *cell).value:.0f}"
            for number in range(len(result.models))
            for cell in result.settings.cells
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["questions"].pop(),
        lambda record: record["answers"][0].pop(),
        lambda record: record["original"].update(cells=[]),
        lambda record: record["settings"].update(lengths=[8]),
    ],
)
def test_a_record_that_does_not_fit_is_refused(compared, change, tmp_path):
    compared.save(tmp_path / "out")
    record = compared.record()
    change(record)
    (tmp_path / "out" / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="^record.json: "):
        crosslayer.load_result(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [255]}, "^`lengths` must be at least 256 tokens, got 255$"),
        ({"lengths": []}, "^lengths must have at least one"),
        ({"lengths": "512"}, "^lengths must be a list, got '512'$"),
        ({"lengths": [4096]}, "^length 4096 .* 2048 positions of Oracle$"),
        ({"depths": [101]}, "^`depths` must be 0-100, got 101$"),
        ({"depths": [-1]}, "^`depths` must be 0-100, got -1$"),
        ({"keys": 0}, "^`keys` must be 1-1600, got 0$"),
        ({"keys": 40}, "^length 512 is too short: template and 40 needles take "),
        ({"samples": 0}, "^samples .*greater than 0.* 0$"),
        ({"new_tokens": 0}, "^new_tokens .*greater than 0.* 0$"),
        ({"batch": 0}, "^batch .*greater than 0.* 0$"),
        ({"seed": -1}, "^seed .*-1$"),
        ({"dtype": "float32"}, "dtype"),
        ({"baseline": tiny("bert", max_position_embeddings=2048)}, "^needles needs a causal LM.* BertModel"),
        ({"baseline": tiny("llama")}, "positions of LlamaForCausalLM$"),
        ({"baseline": tiny("llama", max_position_embeddings=2048)}, "^token id .* is not in the vocabulary of"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(options, message):
    with pytest.raises(ValueError, match=message):
        found(oracle(), **options)


def test_seconds_are_those_of_asking(monkeypatch, folder):
    clock, load = SimpleNamespace(now=0.0), Loadable.load

    def slow(side):
        clock.now += 100
        return load(side)

    monkeypatch.setattr(Loadable, "load", slow)
    monkeypatch.setattr(verb, "time", SimpleNamespace(monotonic=lambda: clock.now))
    asked = crosslayer.needles(folder, baseline=folder, lengths=[512], depths=[50], keys=1, samples=1, new_tokens=1)
    assert clock.now == 200 and asked.seconds == 0


def test_a_loaded_model_needs_its_tokenizer():
    with pytest.raises(ValueError, match="tokenizer="):
        crosslayer.needles(oracle())


@pytest.fixture
def folder(tmp_path):
    random_model(torch.float32).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_says_what_the_call_returns(monkeypatch, folder, tmp_path, capsys):
    options = ["--lengths", "512", "--depths", "0,100", "--keys", 2, "--samples", 2, "--new-tokens", 8]
    status = run(monkeypatch, "needles", folder, "--baseline", folder, *options, "--out", tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    result = crosslayer.load_result(tmp_path / "out")
    assert status == 0 and json.loads(lines[-1]) == result.headline()
    assert result.command.startswith("crosslayer needles model --baseline model --lengths 512")
    assert lines[0].startswith("model") and "depth 100%" in lines[2] and result.sentences()[0] in lines
    again = crosslayer.needles(folder, lengths=[512], depths=[0, 100], keys=2, samples=2, new_tokens=8, batch=3)
    assert again.answers[0] == result.answers[0] and again.questions == result.questions
    assert result.rows[0].change.value == 0


def test_a_smaller_cache_is_in_the_name_of_the_candidate(folder):
    """So that a model beside itself is not confused with itself: in sentences, tables, figures and the JSON line."""
    options = {"lengths": [512], "depths": [50], "keys": 1, "samples": 1, "new_tokens": 1}
    for smaller, name in (
        ({"kv_bits": "4"}, "model, 4 bits"),
        ({"evict": "h2o:0.5"}, "model, h2o:0.5"),
        ({"evict": "h2o:0.5", "kv_bits": "fp8"}, "model, h2o:0.5, fp8"),
    ):
        result = crosslayer.needles(folder, baseline=folder, **options, **smaller)
        assert (result.headline()["candidates"], result.headline()["original"]) == ([name], "model")
        assert [title for title, *_ in result.tables()] == [name, "model"]
        first, second, *_ = result.sentences()
        assert first.startswith(f"The candidate, {name},") and second.startswith("The baseline, model,")
        page = result.layout()
        assert f"{name} against model" in page.title and [panel.title for panel in page.panels][0].startswith(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "64"], "--lengths must be at least 256 tokens, got 64"),
        (["--lengths", "512,x"], "'512,x'"),
        (["--depths", "-5"], "--depths must be 0-100, got -5"),
        (["--depths", "200"], "--depths must be 0-100, got 200"),
        (["--lengths", "4096"], "2048 positions of model"),
        (["--baseline", "./nowhere"], "model folder './nowhere' does not exist"),
    ],
)
def test_the_command_refuses_in_a_line(monkeypatch, folder, options, message, capsys):
    assert run(monkeypatch, "needles", folder, *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]

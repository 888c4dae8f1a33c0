"""Every verb is one call from Python; its result is saved, loaded again equal, and its page opens in a browser."""

import copy
import html
import json
import random

import pytest
import torch

import crosslayer
from crosslayer.core.checkpointing import enable_checkpointing
from tests.helpers.browser import complaints, drawn, opened, resize
from tests.helpers.figures import figures_are_drawn_once  # noqa: F401  used by itself
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny

WINDOWS = {"sequences": 2, "length": 16}


def documents(seed):
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(500)}" for _ in range(900)) for _ in range(3)]


@pytest.fixture(scope="module")
def model():
    return tiny("llama", dtype=torch.float32, vocab_size=len(WORDS), num_hidden_layers=6)


def diagnosed(model):
    return crosslayer.diagnose(model, documents(0), tokenizer(), **WINDOWS)


def intervened(model):
    return crosslayer.intervene(model, documents(0), tokenizer(), interventions=[crosslayer.waiver(5)], **WINDOWS)


def retrofitted(model):
    texts = {"seen": documents(0), "unseen": documents(1)}
    options = {"calibration_text": {"seen": texts["seen"]}, "windows": 32, "calibration": 16, "length": 16}
    return crosslayer.retrofit(model, texts, tokenizer(), method="uniattn", layers="2-3,4-5", **options)


def verified(model):
    return crosslayer.verify(model, tokenizer(), dtypes=["float32"], compile_backend="eager")


def benched(model):
    return crosslayer.bench(model, model, contexts=[8], new_tokens=2, repeats=1)


CALLS = {
    diagnosed: crosslayer.Diagnosis,
    intervened: crosslayer.Effect,
    retrofitted: crosslayer.RetrofitReport,
    verified: crosslayer.Verification,
    benched: crosslayer.Benchmark,
}


@pytest.fixture(scope="module")
def results(model):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    results = {call.__name__: call(model) for call in CALLS}
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    return results


def continued(model):
    return crosslayer.generate(model, "w1 w2 w3", tokenizer(), max_new_tokens=8)


FIGURES = {
    diagnosed: lambda diagnosis: diagnosis.entropy.tolist(),
    intervened: lambda effect: effect.attention_received.tolist(),
    retrofitted: lambda report: (report.rows, report.cache),
    verified: lambda verification: verification.passed,
    benched: lambda benchmark: [(row.value, row.original) for row in benchmark.rows_of("bytes")],
    continued: lambda continuation: (continuation.text, continuation.cache_bytes),
}


@pytest.mark.parametrize("call", FIGURES, ids=lambda call: call.__name__)
def test_a_model_that_is_training_is_measured_without_dropout_or_checkpointing(call, model, results):
    training = copy.deepcopy(model)
    training.config.attention_dropout = 0.5
    for layer in training.model.layers:
        layer.self_attn.attention_dropout = 0.5
    enable_checkpointing(training)
    training.train()
    expected = results.get(call.__name__) or call(model)
    assert FIGURES[call](call(training)) == FIGURES[call](expected)
    assert all(module.training for module in training.modules())


@pytest.fixture(scope="module")
def folders(results, tmp_path_factory):
    parent = tmp_path_factory.mktemp("results")
    return {name: result.save(parent / name).parent for name, result in results.items()}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_result_is_loaded_again_equal(call, results, folders):
    result, folder = results[call.__name__], folders[call.__name__]
    loaded = crosslayer.load_result(folder)
    assert type(loaded) is type(result) is CALLS[call] and loaded == result
    assert loaded.record() == result.record() == json.loads((folder / "record.json").read_text())
    assert loaded.page() == result.page() == (folder / "report.html").read_text()
    assert loaded.headline() == result.headline() and json.dumps(result.headline())
    with pytest.raises(ValueError, match="frozen"):
        loaded.schema_ = "crosslayer/other/1"


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_another_version_is_refused_in_one_line(call, folders, tmp_path):
    record = json.loads((folders[call.__name__] / "record.json").read_text())
    schema = record["schema"]
    (tmp_path / "record.json").write_text(json.dumps(record | {"schema": f"{schema}0"}))
    with pytest.raises(ValueError, match=f"^record.json has the schema '{schema}0'; this release reads {schema}$"):
        crosslayer.load_result(tmp_path)


def test_every_page_opens(browser, results, folders):
    resize(browser, 390)
    for name, result in results.items():
        opened(browser, folders[name] / "report.html")
        check_page(browser, result, name)
    assert not complaints(browser)


@pytest.mark.slow
def test_every_page_opens_also_in_a_notebook(browser, results, folders, tmp_path):
    for name, result in results.items():
        notebook = tmp_path / f"{name}.html"
        notebook.write_text(
            f"<!doctype html><meta charset='utf-8'><link rel='icon' href='data:,'>{result._repr_html_()}"
        )
        resize(browser, 1280)
        opened(browser, folders[name] / "report.html")
        check_page(browser, result, name)
        browser.get(notebook.as_uri())
        browser.switch_to.frame(browser.find_element("css selector", "iframe"))
        drawn(browser)
        check_page(browser, result, name)
        browser.switch_to.default_content()
    assert not complaints(browser)


def check_page(browser, result, name):
    """Expect the title, and something drawn in every figure."""
    title = browser.find_element("css selector", "h1").text
    assert title and html.escape(title) in result.page(), name
    figures = browser.find_elements("css selector", ".figure")
    assert len(figures) == len(result.layout().panels), name
    for figure in figures:
        assert figure.find_elements("css selector", ".mark-line path, .mark-rect path, .mark-symbol path"), name

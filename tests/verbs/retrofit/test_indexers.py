"""Shared indexers of a tiny GLM-5: a planted pattern is found, saved and read back."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import crosslayer
from crosslayer.core.methods import load_methods
from crosslayer.corpus.windows import Windows
from crosslayer.verbs.retrofit.damage import compare
from crosslayer.verbs.retrofit.indexers import WhatIfMeasure
from tests.helpers.shipped import shipped

OPTIONS = {"windows": 16, "length": 48}


def text(count):
    return torch.randint(3, 64, (count, 48), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def planted():
    """Attention of layers 1 and 2 adds nothing, so what they attend to costs nothing; layer 3 needs its own indexer."""
    model = shipped("glm_moe_dsa")
    with torch.no_grad():
        for layer in (1, 2):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
    return model


def test_a_pattern_is_found_exported_and_read_back(planted, tmp_path):
    report = crosslayer.retrofit(planted, text(60), kl_budget=1e-6, **OPTIONS)
    assert report.index_pattern == "FSSF"
    assert report.damage.all.kl == pytest.approx(0, abs=1e-6)
    assert report.choice.groups == [[0, 1, 2]] and report.architecture.retrofit_class == "GlmMoeDsaForCausalLM"
    lines = " ".join(report.sentences())
    assert """--hf-overrides '{"use_index_cache": true, "index_topk_pattern": "FSSF"}'""" in lines
    assert """--json-model-override-args '{"index_topk_pattern": "FSSF"}'""" in lines
    report.save(tmp_path / "out")
    plan = crosslayer.plan(tmp_path / "out", length=128)
    assert plan.plan.choices == (0, 0, 0, 3) == report.plan.choices
    assert crosslayer.load_result(tmp_path / "out").index_pattern == "FSSF"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = text(2)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, report.model(ids).logits)
    original = crosslayer.plan(planted, length=128)  # 16 times the 8 chosen tokens
    assert report.cache.context == 128
    assert report.cache.read_share == pytest.approx(plan.read_bytes / original.read_bytes)
    assert report.cache.share == pytest.approx(plan.stored_bytes / original.stored_bytes)
    assert report.cache.layer_reads == [1, 8 * 12 / (8 * 12 + 128 * 8), 8 * 12 / (8 * 12 + 128 * 8), 1]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "FSSF" in page and "What each layer reads" in page


def test_a_budget_of_reads_is_met(planted):
    report = crosslayer.retrofit(planted, text(60), read_budget=0.6, **OPTIONS)
    assert report.index_pattern == "FSSF" and report.cache.read_share <= 0.6
    (baseline,) = report.choice.search.baselines
    assert baseline.groups == [[0, 1], [2, 3]] and baseline.search_minus_baseline_ci95[1] < 0


def test_a_model_that_shares_already_shares_more():
    """Layer 2 has no indexer; choosers at equal distances are among the layers that have one."""
    types = ["full", "full", "shared", "full", "full", "full"]
    model = shipped("glm_moe_dsa", num_hidden_layers=6, indexer_types=types)
    report = crosslayer.retrofit(model, text(60), read_budget=0.6, **OPTIONS)
    assert report.cache.read_share <= 0.6
    methods = report.choice.search.methods
    assert methods[2] == "own"  # nothing changed there
    assert all(report.index_pattern[layer] == "S" for layer in range(6) if methods[layer] != "own" or layer == 2)
    assert all(report.index_pattern[layer] == "F" for layer in range(6) if methods[layer] == "own" and layer != 2)
    for baseline in report.choice.search.baselines:
        assert all(first != 2 for first, *_ in baseline.groups)


def test_what_engines_read_is_in_the_config(planted):
    """A frequency that the original had would name other layers."""
    model = shipped("glm_moe_dsa", index_topk_freq=2, index_skip_topk_offset=1)
    assert model.config.indexer_types == ["full", "shared", "full", "shared"]
    report = crosslayer.retrofit(model, text(60), method="shared_choice", layers="0-3", **OPTIONS)
    config = report.model.config.to_dict()
    assert config["index_topk_pattern"] == "FSSS" == report.index_pattern
    assert report.changed_layers == [2, 3]  # layer 1 took the choice of layer 0 before
    assert not {"index_topk_freq", "index_skip_topk_offset"} & set(config)
    hy = shipped("hy_v4")
    other = crosslayer.retrofit(hy, text(60), method="shared_choice", layers="0-2", **OPTIONS)
    assert other.index_pattern == "FSS" and not any("vLLM" in line for line in other.sentences())


def test_a_fit_of_weights_that_are_kept_is_refused(planted):
    method = {"name": "shared_choice", "groups": ((0, 1),)}
    with pytest.raises(ValueError, match="fit has no effect on glm_moe_dsa, whose weights are kept"):
        crosslayer.convert(planted, method, fit="refit-o", calibration=text(2))


@torch.no_grad()
def test_the_measure_is_the_kl_of_logits(planted):
    measure = WhatIfMeasure(planted, Windows(text(2), (0, 1)))
    methods = load_methods({"name": "shared_choice", "groups": ((2, 3),), "tokens": 8, "sinks": 0, "window": 1})
    expected = []
    for ids in measure.ids:
        before, after = planted(ids[None]).logits[0].log_softmax(-1), measure.run(methods)(ids[None])[0]
        start = measure.repeat_start
        for rows in (slice(start), slice(start, None)):
            expected.append(compare(before[rows], after[rows], ids[rows])[2])
    assert measure.kl(methods) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


REFUSED = {
    "layers of glm_moe_dsa choose tokens by indexers, and can only share their choices": {"kv_budget": 0.5},
    "layers of glm_moe_dsa choose tokens by indexers, and can only": {"method": "cla"},
    "`read_budget` 0.1 cannot be reached; the least is 0.3143": {"read_budget": 0.1},
    "`kl_budget` 1e-09 is too small": {"kl_budget": 1e-9},
    "all tokens of windows of `length` 48 are chosen, where 64 are": {"read_budget": 0.5, "index_topk": 64},
    "all tokens of windows of `length` 48 are chosen, where 48 are": {
        "method": "shared_choice",
        "layers": "0-1",
        "index_topk": 48,
    },
    "shared_choice changes nothing: these layers share an indexer already": {
        "method": "shared_choice",
        "layers": "0-1",
        "indexer_types": ["full", "shared", "full", "full"],
    },
    "`compensation` refit-o has no effect on glm_moe_dsa, whose weights are kept": {
        "read_budget": 0.5,
        "compensation": "refit-o",
    },
    "shared_choice: sparse_choosers has no effect on glm_moe_dsa": {
        "method": '{"name": "shared_choice", "groups": [[0, 1]], "sparse_choosers": [0], "tokens": 8, "sinks": 0, '
        '"window": 1}'
    },
    "all layers share the indexer of the first already": {
        "kl_budget": 5.0,
        "indexer_types": ["full", "shared", "shared", "shared"],
    },
    "shared_choice: tokens has no effect on glm_moe_dsa, whose indexers choose 8 tokens": {
        "method": '{"name": "shared_choice", "groups": [[0, 1]], "tokens": 64}'
    },
    "layer 3 cannot take the choice of layer 0": {"method": "shared_choice", "layers": "0+3"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    options = dict(REFUSED[message])
    fields = {name: options.pop(name) for name in ("index_topk", "indexer_types") if name in options}
    model = shipped("glm_moe_dsa", **fields)
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.retrofit(model, text(60), **OPTIONS, **options)
    assert "\n" not in str(error.value)

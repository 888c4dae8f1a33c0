"""The layers that a quantized cache leaves exact are those that cost most alone, and vLLM gets options for them."""

import pytest

import crosslayer
from crosslayer.judge.judge import Judge
from crosslayer.testing.tiny import tokens
from crosslayer.verbs.measure.exact_layers import PRICE, dearest, flags, prices
from tests.helpers.tiny import tiny

TEXT = {name: tokens(20, 20, seed) for seed, name in enumerate("abc")}
OPTIONS = {"text": TEXT, "windows": 48, "length": 20, "context": 24, "only": ["kl", "bytes"]}


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def test_the_dearest_layers_stay_exact(model):
    record = crosslayer.measure(model, candidates=["int8", "fp8"], exact_layers=1, **OPTIONS)
    alone = {layer: f"8@{layer}" for layer in range(model.config.num_hidden_layers)}
    assert len(prices(record.rows)["int8"]) == len(alone)
    layer = dearest(prices(record.rows)["int8"], 1)[0]
    costs = prices(record.rows)["int8"]
    assert costs[layer] == max(costs.values())
    names = [candidate.name for candidate in record.candidates]
    assert ["vLLM" in candidate.engines for candidate in record.candidates] == [False, True, False, True]
    quantities = [row["quantity"] for row in record.headline()["rows"]]
    assert quantities.count("KL") == quantities.count("bytes") == len(names)  # without those of domains
    assert names == [
        "int8",
        "fp8",
        f"int8, layer {layer} exact",
        f"fp8, layer {dearest(prices(record.rows)['fp8'], 1)[0]} exact",
    ]
    by_hand = ",".join(f"8@{other}" for other in alone if other != layer)
    same = crosslayer.measure(model, candidates={"own": by_hand}, **OPTIONS)
    assert record.row(names[2], "KL").value == pytest.approx(same.row("own", "KL").value, rel=1e-6)
    assert record.row(names[2], "bytes").value == same.row("own", "bytes").value
    assert all(row.change.n > 1 for row in record.rows_of(PRICE))
    assert "--kv-cache-dtype-skip-layers" in " ".join(record.sentences())


def test_vllm_gets_options():
    costs = dict(enumerate([0.5, 0.1, 0.4, 0.0, 0.9, 0.2]))
    assert "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 2 4 (86% of" in flags(costs, "fp8", 3)
    assert flags(costs, "int4", 1) == flags(costs, "int3", 1) == ""
    assert "--kv-cache-dtype-skip-layers 17 (50% of" in flags({5: 0.1, 11: 0.2, 17: 0.3}, "fp8", 1)
    assert flags(dict.fromkeys(range(6), 0.0), "fp8", 1) == ""


def test_what_cannot_be_left_exact_is_refused_before_anything_is_measured(model, monkeypatch):
    monkeypatch.delattr(Judge, "kl")
    with pytest.raises(ValueError, match="exact_layers"):
        crosslayer.measure(model, candidates=["h2o:0.5"], exact_layers=1, **OPTIONS)
    with pytest.raises(ValueError, match="exact_layers"):
        crosslayer.measure(model, candidates=["int8"], exact_layers=model.config.num_hidden_layers, **OPTIONS)

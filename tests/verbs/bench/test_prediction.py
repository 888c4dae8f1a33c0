"""Predictions are the sums of their terms, and are left out where a structure cannot be told."""

import numpy as np
import pytest
import torch

from crosslayer.verbs.bench.costs import Load, Operators, Rates, predict, structure
from crosslayer.verbs.bench.sentences import TOO_FEW, sentences
from tests.helpers.benches import BYTES, short
from tests.helpers.tiny import tiny


def test_prediction_is_the_sum_of_its_terms():
    model, load = structure(tiny("llama")), Load(context=10, batch=2, new_tokens=3)
    rates = Rates(matrices=1e6, attention=2e6, weights=4e6, states=5e6, copies=8e6, operator=1e-3)
    matrices, attention = model.prefill_flops(2, 10)
    head, weights = model.head * BYTES / 4e6, model.weight_bytes() / 4e6
    hand = {
        "ttft": matrices / 1e6 + attention / 2e6 + head + 0.1,
        "tpot_dynamic": weights + model.state_bytes(2, 12) / 5e6 + model.copied_bytes(2, 12) / 8e6 + 0.1,
        "tpot_static": weights + model.state_bytes(2, 13) / 5e6 + 0.2,
    }
    predictions = predict(model, rates, load, Operators(dynamic=100, static=200))
    for measure, prediction in predictions.items():
        assert prediction.seconds == pytest.approx(hand[measure]), measure
        assert sum(prediction.work.values()) + prediction.operators == pytest.approx(prediction.seconds), measure
    assert predictions["tpot_static"].operator_share == pytest.approx(0.2 / hand["tpot_static"])


def test_operators_are_launched_while_an_asynchronous_device_computes():
    units = dict.fromkeys(("matrices", "attention", "weights", "states", "copies"), 1.0)
    assert Rates(**units, operator=1e-3).seconds(0.5, 100) == 0.6
    assert Rates(**units, operator=1e-3, asynchronous=True).seconds(0.5, 100) == 0.5


def test_experts_are_measured_but_not_predicted():
    model = tiny("mixtral", dtype=torch.float32)
    with pytest.raises(ValueError, match="3 dimensions"):
        structure(model)
    benchmark = short(model, model, 4)
    assert benchmark.no_prediction.startswith("no prediction") and benchmark.rows[0].ttft.predicted_ratio is None
    assert benchmark.rows[0].cache.dynamic.ratio == 1 and benchmark.rows[0].rates is None
    assert all(time.predicted_ratio is None for time in benchmark.rows[0].times().values())
    assert np.isnan(benchmark.intervals).all()
    assert [panel.key for panel in benchmark.layout().panels] == ["ratios_batch_1_sdpa"]
    words = sentences(benchmark)
    assert sum(TOO_FEW in word for word in words) == 1
    assert any(word.startswith("No prediction: ") for word in words)

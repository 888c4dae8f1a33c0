"""What is known of the two embedded models must be what a diagnosis shows; and what a diagnosis may cost."""

import importlib.util
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

import crosslayer


def test_smollm2_shows_its_sink():
    diagnosis = crosslayer.diagnose("smollm2", sequences=1, device="cpu")
    hidden, share, value = diagnosis.hidden_norm_ratio, diagnosis.first_token_share, diagnosis.value_norm_ratio
    assert (hidden[12:19] > 100).all() and (hidden[10:12] < 3).all()
    assert (share[12:29] > 0.3).mean() > 0.8 and (share[[0, 1, 2, 10, 11]] < 0.1).all()
    assert (value[12:29] < 0.4).all()
    adjacent = np.diag(diagnosis.map_similarity, 1)[15:].mean()
    rest = np.diag(diagnosis.map_similarity_without_first, 1)[15:].mean()
    assert 0.85 < adjacent < 0.95 and rest < adjacent - 0.1
    alike = diagnosis.map_similarity_without_first[3:10, 3:10]  # these layers attend to three or four early tokens
    assert alike.min() > 0.85 and "early tokens" in diagnosis.page()
    by_depth = diagnosis.verdict.cache.by_depth
    assert by_depth.groups == [[18, 19, 20, 21], [22, 23, 24, 25], [26, 27, 28, 29]]
    assert {entry.method: entry.share for entry in by_depth.kept}["uniattn"] == pytest.approx(0.85)
    assert diagnosis.verdict.sink.layers[0] == 12
    massive = diagnosis.verdict.massive
    assert massive.layers == list(range(12, 29)) and massive.channels[0] == 507 and massive.value > 20000
    assert "massive_activations" in {panel.key for panel in diagnosis.layout().panels}


def test_minilm_shows_cls_and_the_outliers_of_its_position_table():
    diagnosis = crosslayer.diagnose("minilm", sequences=4, device="cpu")
    assert (diagnosis.first_token_share[1:] > 20 / 512).all()  # twenty times an even spread
    assert diagnosis.top_tokens[1][0].token == "[CLS]"
    table = diagnosis.position_table
    assert table.outliers[:2] == [0, 511]
    assert table.norms[0] == pytest.approx(2.36, abs=0.01) and table.norms[511] == pytest.approx(0.97, abs=0.01)


@pytest.mark.slow
def test_a_diagnosis_costs_at_most_two_forward_passes_and_500_mb():
    path = Path(__file__).parents[3] / "benchmarks" / "diagnose.py"
    spec = importlib.util.spec_from_file_location("benchmark", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    seconds = benchmark.times(["plain", "crosslayer"], 2048, 3)
    assert statistics.median(a / b for a, b in zip(seconds["crosslayer"], seconds["plain"], strict=True)) < 2.0
    peaks = {side: benchmark.child(sys.executable, "--child", "peak", side, "2048")["bytes"] for side in seconds}
    assert peaks["crosslayer"] - peaks["plain"] < 500e6
    assert benchmark.child(sys.executable, "--child", "peak", "crosslayer", "8192")["bytes"] < 4e9

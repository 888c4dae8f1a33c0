"""What is known of the two embedded models must be what a diagnosis shows; and what a diagnosis may cost."""

import importlib.util
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

import crosslayer
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import pack


def diagnose(name, sequences=8):
    model, tokenizer = crosslayer.load_model(name, device="cpu")
    ids = pack(load_documents(TextSource()), tokenizer, sequences=sequences, length=512)
    record = crosslayer.diagnose(model, ids, tokenizer).record()
    return record, {key: np.array(value["mean"], dtype=float) for key, value in record["measures"].items()}


def test_smollm2_shows_its_sink():
    record, mean = diagnose("smollm2", sequences=3)
    hidden, share, value = mean["hidden_norm_ratio"], mean["first_token_share"], mean["value_norm_ratio"]
    assert (hidden[12:19] > 100).all() and (hidden[10:12] < 3).all()
    assert (share[12:29] > 0.3).mean() > 0.8 and (share[[0, 1, 2, 10, 11]] < 0.1).all()
    assert (value[12:29] < 0.4).all()
    adjacent, rest = (np.diag(mean[key], 1)[15:].mean() for key in ("map_similarity", "map_similarity_without_first"))
    assert 0.85 < adjacent < 0.95 and rest < adjacent - 0.1
    assert record["verdict"]["superblocks"]["paper"] == [[18, 19, 20, 21], [22, 23, 24, 25], [26, 27, 28, 29]]
    assert record["verdict"]["kv_share"]["paper"]["uniattn"] == pytest.approx(0.85)
    assert record["verdict"]["sink"]["begins"] == 12


def test_minilm_shows_cls_and_the_outliers_of_its_position_table():
    record, mean = diagnose("minilm", sequences=4)
    assert (mean["first_token_share"][1:] > 20 / 512).all()  # twenty times an even spread
    assert record["top_tokens"][1][0]["token"] == "[CLS]"
    table = record["position_table"]
    assert table["outliers"][:2] == [0, 511]
    assert table["norms"][0] == pytest.approx(2.36, abs=0.01) and table["norms"][511] == pytest.approx(0.97, abs=0.01)


@pytest.mark.slow
def test_a_diagnosis_costs_at_most_two_forward_passes_and_500_mb():
    path = Path(__file__).parent.parent.parent / "benchmarks" / "diagnose.py"
    spec = importlib.util.spec_from_file_location("benchmark", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    found = benchmark.times(["plain", "crosslayer"], 2048, 3)
    assert statistics.median(a / b for a, b in zip(found["crosslayer"], found["plain"], strict=True)) < 2.0
    peaks = {side: benchmark.child(sys.executable, "--child", "peak", side, "2048")["bytes"] for side in found}
    assert peaks["crosslayer"] - peaks["plain"] < 500e6
    assert benchmark.child(sys.executable, "--child", "peak", "crosslayer", "8192")["bytes"] < 4e9

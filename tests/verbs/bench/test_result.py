"""What a bench gives from Python: typed rows, arrays, a record, a folder, a page."""

import copy
import json

import pytest
import torch
from pydantic import ValidationError

from crosslayer.judge.clock import TIMES
from crosslayer.output.progress import metered_by
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.run import bench
from tests.helpers.benches import BYTES, STATE, UNIATTN, short
from tests.helpers.meters import Recorder
from tests.helpers.saved import ours, save
from tests.helpers.tiny import tiny


@pytest.fixture(scope="module")
def benchmark():
    models = build(config_of(UNIATTN)), build(config_of([]))
    return bench(*models, contexts=(12,), batches=(2,), new_tokens=3, repeats=5)


def test_allocated_bytes_are_the_plans(benchmark):
    plan = config_of(UNIATTN).plan
    for quantity in ("bytes", "bytes, static cache"):
        (row,) = benchmark.rows_of(quantity)
        assert row.change.value == plan.cached_fraction() == row.value / row.original
        assert row.details["original_stored"] == 2 * 15 * 12 * STATE * BYTES == 4 * row.original  # in float64
    assert benchmark.rows_of("reads of a step")[0].change.value == 1


def test_times_are_within_their_intervals(benchmark):
    rows = [row for row in benchmark.rows if row.unit == "s"]
    assert [row.quantity for row in rows] == list(TIMES)
    for row in rows:
        assert row.scope == "context 12, batch 2, sdpa" and row.change.n == 5
        assert row.value > 0 and row.details["spread"] >= 0
        assert row.change.low <= row.change.value <= row.change.high
    assert not benchmark.rows_of("softmax share")


def test_a_saved_bench_is_loaded_again_equal(benchmark, tmp_path):
    page = benchmark.save(tmp_path / "out").read_text()
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record == benchmark.record() and record["schema"] == "crosslayer/bench/9"
    assert Benchmark.from_record(record) == benchmark and page == Benchmark.from_record(record).page()
    assert record["candidates"][0]["model"]["class"] == "CrossLayerForCausalLM" and record["command"] is None
    assert "bytes, static" in page and "tokens, 3" in page
    assert "93.8% interval" in page and "5 pairs" in page  # what each interval is of
    figures = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert figures == {"ratios"}
    instant = copy.deepcopy(record["rows"])
    next(row for row in instant if row["quantity"] == "ttft")["change"]["value"] = 0.0
    for change in ({"candidates": []}, {"rows": instant}, {"colour": "red"}):
        with pytest.raises(ValidationError):
            Benchmark.from_record({**record, **change})
    with pytest.raises(ValueError, match="crosslayer/bench/9"):
        Benchmark.from_record({**record, "schema": "crosslayer/bench/2"})


def test_every_ratio_is_drawn_with_its_interval(benchmark):
    (ratios,) = benchmark.layout().panels
    rows = [row for row in benchmark.rows if row.quantity in ("bytes", *TIMES)]
    assert (
        [name.startswith("context 12 (batch 2, sdpa, ") for name in ratios.dots.names]
        == [True] * 4
        == [True] * len(rows)
    )
    changes = [(row.change.value, *row.change.interval) for row in rows]
    drawn = zip(ratios.dots.x, ratios.dots.low, ratios.dots.high, strict=True)
    for own, (value, low, high) in zip(changes, drawn, strict=True):
        assert [100 * (end - 1) for end in own] == pytest.approx([value, low, high])


def test_sentences_and_headline(benchmark):
    written = benchmark.sentences()
    assert "83.3%" in written[0]
    assert any("5 pairs" in sentence and "93.8%" in sentence for sentence in written)
    headline = benchmark.headline()
    assert headline["candidates"] == ["CrossLayerForCausalLM"] and headline["failed"] == {}
    quantities = [row["quantity"] for row in headline["rows"]]
    assert quantities == ["bytes", "bytes, static cache", *TIMES, "peak memory", "reads of a step"]


def test_windows_are_known():
    (row,) = short(tiny("mistral"), tiny("llama"), 20, new_tokens=2).rows_of("bytes, static cache")
    assert row.details["stored"] == 3 * 8 * 2 * STATE * BYTES


def test_a_model_by_name_is_loaded_as_the_other_one_is(tmp_path):
    folder, meter = save(ours("cla"), tmp_path / "model"), Recorder()
    with metered_by(meter):
        benchmark = short(folder, tiny("llama", dtype=torch.float32).bfloat16(), 4)
    assert [one.model.dtype for one in benchmark.models] == ["bfloat16"] * 2
    assert [one.name for one in benchmark.models] == ["model", "LlamaForCausalLM"]
    assert meter.works == [(f"loading {folder}", 0), ("benchmarking", 2)]
    assert short(folder, folder, 4, dtype="float64").original.model.dtype == "float64"
    with pytest.raises(ValueError, match="dtype"):
        short(tiny("llama"), tiny("llama"), 4, dtype="float32")

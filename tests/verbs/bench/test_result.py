"""What a bench gives from Python: typed rows, arrays, a record, a folder, a page."""

import copy
import json

import pytest
import torch
from pydantic import ValidationError

from crosslayer.output.panel import chart
from crosslayer.output.progress import metered_by
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.bench.page import measurements
from crosslayer.verbs.bench.record import MEASURES
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.run import bench
from crosslayer.verbs.bench.sentences import sentences
from tests.helpers.benches import BYTES, STATE, UNIATTN, short
from tests.helpers.meters import Recorder
from tests.helpers.saved import ours, save
from tests.helpers.tiny import tiny


@pytest.fixture(scope="module")
def benchmark():
    models = build(config_of(UNIATTN)), build(config_of([]))
    return bench(*models, contexts=(12,), batches=(2,), new_tokens=3, repeats=5)


def test_allocated_bytes_are_the_plans(benchmark):
    row, plan = benchmark.rows[0], config_of(UNIATTN).plan
    for _, cache in row.cache:
        assert cache.ratio == plan.cached_fraction()
        assert cache.baseline == 2 * 15 * 12 * STATE * BYTES
    assert row.reads.ratio == 1


def test_times_are_within_their_intervals(benchmark):
    row = benchmark.rows[0]
    for time in row.times().values():
        for timing in time.both():
            low, high = timing.quartiles
            assert 0 < low <= timing.median <= high
        assert time.change.low <= time.change.value <= time.change.high
    speed = f"{2 / row.tpot_static.baseline.median:.1f}"
    assert speed in next(cells for cells in measurements(benchmark) if cells[1] == "tokens/s, static cache")
    assert row.attention == "sdpa" and row.softmax_share is None


def test_a_saved_bench_is_loaded_again_equal(benchmark, tmp_path):
    page = benchmark.save(tmp_path / "out").read_text()
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record == benchmark.record() and record["schema"] == "crosslayer/bench/7"
    assert Benchmark.from_record(record) == benchmark and page == Benchmark.from_record(record).page()
    assert record["models"]["candidate"]["class"] == "CrossLayerForCausalLM" and record["command"] is None
    assert "KV cache, static, allocated" in page and "random tokens, 3 decoded" in page
    for interval in ("candidate\n(median, quartiles)", "candidate ÷ baseline\n(median, 93.8% interval)"):
        assert f"<th>{interval}</th>" in page  # what each interval is of
    figures = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert figures == {"ratios_batch_2_sdpa", "times_batch_2_sdpa"}
    instant = copy.deepcopy(record["rows"])
    instant[0]["ttft"]["change"]["value"] = 0.0
    for change in ({"rows": []}, {"rows": instant}, {"colour": "red"}):
        with pytest.raises(ValidationError):
            Benchmark.from_record({**record, **change})
    with pytest.raises(ValueError, match="this release reads crosslayer/bench/7"):
        Benchmark.from_record({**record, "schema": "crosslayer/bench/2"})


def test_intervals_are_drawn_side_by_side_with_a_legend_that_names_them(benchmark):
    ratios, times = benchmark.layout().panels
    spans = [line for line in ratios.lines if line.low is not None]
    assert len(spans) == 3 and all("93.8% interval" in line.name for line in spans)
    measured = [line for line in times.lines if line.low is not None]
    assert [line.name for line in measured] == ["candidate (quartiles)", "baseline (quartiles)"]
    assert (measured[0].low[0], measured[0].high[0]) == tuple(
        1e3 * end for end in benchmark.rows[0].tpot_dynamic.candidate.quartiles
    )
    for panel in (ratios, times):
        drawn = [row["at"] for row in chart(panel)["datasets"]["lines"] if row["low"] is not None]
        assert len(set(drawn)) == len(drawn) > 1  # a bar each, none over another


def test_sentences_and_headline(benchmark):
    written = sentences(benchmark)
    assert "83.3%" in written[0] and "0.833x" in written[0] and "1.00x" in written[0]
    assert any("median of 5 pairs of runs" in sentence and "93.8%" in sentence for sentence in written)
    assert benchmark.headline()["results"][0].keys() == {
        "context",
        "batch",
        "attention",
        "kv_share",
        "allocated_bytes",
        "baseline_allocated_bytes",
        *MEASURES,
    }
    assert benchmark.headline()["candidate"] == "CrossLayerForCausalLM"


def test_windows_are_known():
    row = short(tiny("mistral"), tiny("llama"), 20, new_tokens=2).rows[0]
    assert row.cache.static.candidate == 3 * 8 * 2 * STATE * BYTES


def test_a_model_by_name_is_loaded_as_the_other_one_is(tmp_path):
    folder, meter = save(ours("cla"), tmp_path / "model"), Recorder()
    with metered_by(meter):
        benchmark = short(folder, tiny("llama", dtype=torch.float32).bfloat16(), 4)
    assert [model.dtype for model in benchmark.models.both()] == ["bfloat16"] * 2
    assert [model.name for model in benchmark.models.both()] == ["model", "LlamaForCausalLM"]
    assert meter.works == [(f"loading {folder}", 0), ("benchmarking", 2)]
    assert short(folder, folder, 4, dtype="float64").models.baseline.dtype == "float64"
    with pytest.raises(ValueError, match="dtype"):
        short(tiny("llama"), tiny("llama"), 4, dtype="float32")

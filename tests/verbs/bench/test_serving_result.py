"""The result of a bench in vLLM, which is loaded where there is no vLLM."""

import crosslayer
from crosslayer.stats.times import compare_times
from crosslayer.verbs.bench.record import Both, ServedModel, ServingRow, ServingSettings


def test_the_result_comes_back_and_says_what_the_cache_holds(tmp_path):
    facts = {"class": "LlamaForCausalLM", "layers": 2, "kv_blocks": 3, "not_saved": None}
    models = Both(
        candidate=ServedModel(name="ours", kv_tokens=300, **facts),
        baseline=ServedModel(name="old", kv_tokens=10, **facts),
    )
    time = compare_times([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    settings = {"contexts": [8], "requests": [2], "new_tokens": 2, "repeats": 3, "kv_bytes": 2**30, "seed": 0}
    speeds = Both(candidate=2.0, baseline=1.0)
    result = crosslayer.ServingBenchmark(
        models=models,
        settings=ServingSettings(**settings, dtype=None),
        engine="vLLM 0",
        rows=(ServingRow(context=8, requests=2, time=time, tokens_per_second=speeds),),
        seconds=1.0,
    )
    result.save(tmp_path / "out")
    assert crosslayer.load_result(tmp_path / "out") == result
    first, few, waiting = result.sentences()
    assert "too few pairs" in few
    assert "hold 300 tokens of ours and 10 of old" in first and "30.00x" in first
    assert "cache of old is too small" in waiting
    assert result.headline()["throughput"][0]["ratio"] == 2.0 and "30.00x" in result.page()

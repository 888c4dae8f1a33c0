"""The result of a bench in vLLM, which is loaded where there is no vLLM."""

import crosslayer
from crosslayer.judge.report import JudgedModel, Row
from crosslayer.judge.rows import count_ratio
from crosslayer.stats.times import paired_ratio
from crosslayer.verbs.bench.result import ServingSettings


def test_the_result_comes_back_and_says_what_the_cache_holds(tmp_path):
    ours, old = (
        JudgedModel(name=name, details={"layers": 2, "kv_blocks": 3, "kv_tokens": tokens})
        for name, tokens in (("ours", 300), ("old", 10))
    )
    capacity = Row(
        quantity="KV cache capacity",
        unit="tokens",
        candidate="ours",
        original=10,
        value=300,
        change=count_ratio(300, 10),
    )
    faster = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    facts = {"scope": "context 8, 2 requests", "value": 2.0, "original": 1.0}
    throughput = Row(quantity="throughput", unit="tokens/s", candidate="ours", change=faster, better="higher", **facts)
    settings = {"contexts": [8], "requests": [2], "new_tokens": 2, "repeats": 3, "kv_bytes": 2**30, "seed": 0}
    result = crosslayer.ServingBenchmark(
        original=old,
        candidates=(ours,),
        settings=ServingSettings(**settings, dtype=None),
        engine="vLLM 0",
        rows=(capacity, throughput),
        seconds=1.0,
    )
    result.save(tmp_path / "out")
    assert crosslayer.load_result(tmp_path / "out") == result
    first, _, few, waiting = result.sentences()
    assert "few pairs" in few and "30.000x" in first
    assert "too small" in waiting
    assert result.headline()["rows"][1]["change"] == 2.0 and "30.000x" in result.page()

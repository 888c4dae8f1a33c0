"""What does not fit is skipped with a word."""

import pytest

from crosslayer.judge import clock
from crosslayer.judge.clock import Load
from crosslayer.output.progress import metered_by
from tests.helpers.benches import short
from tests.helpers.meters import Recorder
from tests.helpers.tiny import tiny


def test_what_is_too_large_is_skipped_with_a_word(monkeypatch):
    models = (tiny("llama"), tiny("llama"))
    monkeypatch.setattr(clock, "free_memory", lambda device: 60_000)
    meter = Recorder()
    with metered_by(meter):
        benchmark = short(*models, (2, 60))
    assert {row.scope for row in benchmark.rows} == {"context 2, batch 1, sdpa"} and meter.steps[-1][:2] == (4, 4)
    assert "context 60, batch 1" in benchmark.skipped[0]
    assert any("context 60, batch 1" in sentence for sentence in benchmark.sentences())
    monkeypatch.setattr(clock, "free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match="context 60"):
        short(*models, 60)


def test_a_prompt_that_is_read_with_eviction_needs_a_mask_for_each_head(monkeypatch):
    monkeypatch.setattr(clock, "free_memory", lambda device: 400_000)
    assert not short(tiny("llama"), tiny("llama"), 60).skipped
    mask = 4 * 60**2 * (2 + 8)  # heads, pairs of tokens, bytes: beside 271,616 bytes of all else
    assert mask == 144_000
    with pytest.raises(ValueError, match="context 60, batch 1"):
        short(tiny("llama"), tiny("llama"), 60, evict="h2o:0.4")


def test_eager_attention_needs_two_copies_of_a_layer_s_maps(monkeypatch):
    models = [tiny("llama"), tiny("llama")]
    needs = {}
    for attention in ("sdpa", "eager"):
        load, free = Load(60, 2, 1, attention), 0
        while clock.too_large(models, load) is not None or not free:
            free += 1600
            monkeypatch.setattr(clock, "free_memory", lambda device, free=free: free)
        needs[attention] = free
    assert needs["eager"] - needs["sdpa"] == pytest.approx(2 * 2 * 4 * 60**2 * 4, abs=1600)  # heads, pairs, float32
    benchmark = short(*models, 60, attention=["sdpa", "eager"])
    scopes = {row.scope for row in benchmark.rows}
    assert scopes == {f"context 60, batch 1, {kind}" for kind in ("sdpa", "eager")} and not benchmark.skipped
    monkeypatch.setattr(clock, "free_memory", lambda device: needs["sdpa"] // 2 + 1600)
    benchmark = short(*models, 60, attention=["sdpa", "eager"])
    assert {row.scope[-4:] for row in benchmark.rows} == {"sdpa"} and "eager" in benchmark.skipped[0]

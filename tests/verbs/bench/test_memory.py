"""What does not fit is skipped with a word, and free and peak memory are the machine's."""

import psutil
import pytest
import torch

from crosslayer.verbs.bench import memory
from crosslayer.verbs.bench.costs import Load
from crosslayer.verbs.bench.memory import free_memory, peak_memory
from crosslayer.verbs.bench.sentences import sentences
from tests.helpers.benches import short
from tests.helpers.meters import Recorder
from tests.helpers.tiny import tiny


def test_eager_and_what_is_too_large_are_skipped_with_a_word(monkeypatch):
    models = (tiny("llama"), tiny("llama"))
    need = 2 * 2 * 4 * 12**2 * 4
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * need - 1)
    assert memory.eager_skip(models[1], Load(12, 2, 1)) is not None
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * need)
    assert memory.eager_skip(models[1], Load(12, 2, 1)) is None
    monkeypatch.setattr(memory, "free_memory", lambda device: 60_000)
    meter = Recorder()
    benchmark = short(*models, (2, 60), progress=meter)
    assert [row.context for row in benchmark.rows] == [2] and meter.steps[-1][:2] == (4, 4)
    assert benchmark.rows[0].eager is not None and benchmark.rows[0].no_eager is None
    assert benchmark.skipped[0].context == 60 and "needs about" in benchmark.skipped[0].reason
    assert any("context 60, batch 1 needs about" in sentence for sentence in sentences(benchmark))
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match="nothing was measured: context 60"):
        short(*models, 60)


def test_a_prompt_that_is_read_with_eviction_needs_a_mask_for_each_head(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 400_000)
    assert not short(tiny("llama"), tiny("llama"), 60).skipped
    mask = 4 * 60**2 * (2 + 8)  # heads, pairs of tokens, bytes: beside 271,616 bytes of all else
    assert mask == 144_000
    with pytest.raises(ValueError, match="context 60, batch 1 needs about"):
        short(tiny("llama"), tiny("llama"), 60, evict="h2o:0.4")


def test_eager_that_does_not_fit_is_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(memory, "_activation_bytes", lambda structure, tokens: 0)
    free = 2 * 4 * 60**2 * 4
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * free - 1)
    row = short(tiny("llama"), tiny("llama"), 60).rows[0]
    assert row.eager is None and row.no_eager.startswith("skipped: eager attention")
    row = short(tiny("llama"), tiny("llama"), 4, attention="eager").rows[0]
    assert row.eager is None and row.no_eager == "attention is eager already"


def test_a_container_leaves_no_more_than_its_limit(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    free = free_memory(cpu)
    assert 2**20 < free <= psutil.virtual_memory().total
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.max").write_text("3000000")
    (group / "memory.current").write_text("1000000")
    monkeypatch.setattr(memory, "GROUP", group)
    assert free_memory(cpu) == 2_000_000
    (group / "memory.stat").write_text("anon 100000\ninactive_file 900000\n")  # cached files, which are given up
    assert free_memory(cpu) == 2_900_000
    (group / "memory.max").write_text("max")
    assert free_memory(cpu) > 2_000_000


def test_the_peak_of_a_block():
    with peak_memory(torch.device("cpu")) as peak:
        held = torch.ones(50 * 2**20 // 4)
        del held
    assert (peak.bytes is None) == (peak.reason is not None)
    assert peak.bytes is None or 45 * 2**20 < peak.bytes < 150 * 2**20

"""Free and peak memory are the machine's."""

import psutil
import torch

from crosslayer import machine
from crosslayer.machine import free_memory, full_float32, peak_memory


def test_a_container_leaves_no_more_than_its_limit(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    free = free_memory(cpu)
    assert 2**20 < free <= psutil.virtual_memory().total
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.max").write_text("3000000")
    (group / "memory.current").write_text("1000000")
    monkeypatch.setattr(machine, "GROUP", group)
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


def test_products_are_those_of_float32_inside_and_what_they_were_behind():
    """Trainer turns on TF32 for the whole process, on a GPU, and nothing turns it off."""
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [setting.fp32_precision for setting in settings]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with full_float32():
            assert [setting.fp32_precision for setting in settings] == ["ieee", "ieee"]
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == before[1]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before[0]

"""Free and peak memory are the machine's."""

import psutil
import pytest
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


@pytest.mark.parametrize("everywhere, own", [("tf32", "none"), ("none", "tf32"), ("none", "none"), ("ieee", "tf32")])
def test_products_are_those_of_float32_inside_and_what_they_were_afterwards(everywhere, own):
    """Trainer turns on TF32 for the whole process, on a GPU, and nothing turns it off."""
    matmul, before = torch.backends.cuda.matmul, torch.backends.fp32_precision
    assert matmul.fp32_precision == before == "none"
    try:
        torch.backends.fp32_precision, matmul.fp32_precision = everywhere, own
        expected = matmul.fp32_precision
        with full_float32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == expected
        torch.backends.fp32_precision = "ieee"  # which reaches what has no setting of its own
        assert matmul.fp32_precision == ("ieee" if own == "none" else own)
    finally:
        torch.backends.fp32_precision, matmul.fp32_precision = before, "none"

"""The kernels compile for a GPU that is not there, and keep everything in registers."""

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

GPU = Path(__file__).parents[3] / "benchmarks" / "gpu"
COUNT = 8


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.syspath_prepend(GPU)
    import compile_kernels

    yield compile_kernels
    sys.modules.pop("compile_kernels")


@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 4096), (torch.float32, 1024), (torch.bfloat16, 7186)])
def test_depth_attention(compiler, dtype, width):
    for name, launch in compiler.launches(dtype, width, COUNT).items():
        assert compiler.measure(*launch, 90)["spilled_bytes"] == 0, name


def test_pages(compiler):
    for architecture in compiler.TARGETS:
        for name, launch in compiler.page_launches().items():
            assert compiler.measure(*launch, architecture)["spilled_bytes"] == 0, (architecture, name)

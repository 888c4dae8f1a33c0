"""What a result was made with: versions and machine; what a machine gets wrong; transformers' chatter, switched off."""

import functools
import importlib.metadata
import os
import platform
import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers.utils import logging as transformers_logging

PACKAGES = ("crosslayer", "torch", "transformers", "tokenizers", "safetensors", "numpy")
FLEX_SHAPE, FLEX_DRAWS, FLEX_TOLERANCE = (2, 4, 24, 8), 8, 1e-3  # (B, H, T, D); rounding makes 3e-7, the fault 1 to 3


def environment() -> dict:
    """Return versions and the kind of machine, without its name or any path."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    machine = {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return {"versions": versions, "machine": machine}


def check_flex(kind: str | None, device: torch.device) -> None:
    """Refuse flex attention on a CPU for which torch compiles it wrong; the first call there takes some seconds.

    Raises:
        ValueError: `kind` is flex attention, `device` a CPU, and `flex_fault` found something.

    """
    if kind != "flex_attention" or device.type != "cpu" or torch.compiler.is_compiling():
        return
    fault = flex_fault()
    if fault is not None:
        raise ValueError(f"{fault}; use attn_implementation='sdpa' or 'eager'")


@functools.cache
def flex_fault() -> str | None:
    """Compile flex attention for this CPU, compare it with SDPA, and return in words how it is wrong, or None.

    Where torch 2.13 compiles it without AVX-512, some shapes give numbers that are off by more than 1, or NaN, or do
    not compile at all. Which ones changes from run to run, so that it is computed several times.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # not quick to import

    cpu = f"flex attention that torch {torch.__version__} compiles for this CPU"
    batch, heads, tokens, size = FLEX_SHAPE
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cpu")
            compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=causal, enable_gqa=True))
            for seed in range(FLEX_DRAWS):
                source = torch.Generator().manual_seed(seed)
                q = torch.randn(batch, heads, tokens, size, generator=source, device="cpu")
                k, v = torch.randn(2, batch, heads // 2, tokens, size, generator=source, device="cpu")
                right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                gap = (compiled(q, k, v) - right).abs().max().item()
                if not gap <= FLEX_TOLERANCE:
                    return f"{cpu} is wrong: it differs from SDPA by {gap:.2g}"
    except Exception as error:
        return f"{cpu} fails: {type(error).__name__}"
    return None


@contextmanager
def quiet_transformers():
    """Silence transformers' own warnings and progress bars inside the block; restore them afterwards."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()

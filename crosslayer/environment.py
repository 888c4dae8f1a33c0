"""With what a result was computed: versions, machine; what a machine gets wrong; transformers' chatter switched off."""

import functools
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import BaseModel
from transformers.utils import logging as transformers_logging

PACKAGES = ("crosslayer", "torch", "transformers", "tokenizers", "safetensors", "numpy")
FLEX_RUNS, FLEX_TOLERANCE = 4, 1e-3  # rounding makes 5e-7, the fault 0.4 and more
FLEX_TOKENS = 24


class Machine(BaseModel, frozen=True, extra="forbid"):
    """The kind of machine that a result comes from, without its name."""

    system: str
    processor: str
    cores: int | None
    threads: int
    gpu: str | None


class Environment(BaseModel, frozen=True, extra="forbid"):
    """Versions of packages, None where one is missing, and the machine."""

    versions: dict[str, str | None]
    machine: Machine


def environment() -> Environment:
    """Return versions and the kind of machine, without its name or any path."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    machine = Machine(
        system=platform.system(),
        processor=platform.machine(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )
    return Environment(versions=versions, machine=machine)


def check_flex(kind: str | None, device: torch.device) -> None:
    """Refuse flex attention on a CPU for which torch compiles it wrong; the first call there takes some seconds.

    Raises:
        ValueError: `kind` is flex attention, `device` a CPU, and `flex_error` tells of a fault.
    """
    if kind != "flex_attention" or device.type != "cpu" or torch.compiler.is_compiling():
        return
    fault = flex_error()
    if fault is not None:
        raise ValueError(f"{fault}; use attn_implementation='sdpa' or 'eager'")


@functools.cache
def flex_error() -> str | None:
    """Return in words how flex attention is wrong that torch compiles for this CPU, or None; it is tried once.

    Where torch 2.13 compiles it without AVX-512, some shapes give numbers that are off by more than 1, or NaN, or do
    not compile at all. Which ones changes from run to run, so that it is computed several times.
    """
    cpu = f"flex attention that torch {torch.__version__} compiles for this CPU"
    try:
        for gap in flex_gaps():
            if not gap <= FLEX_TOLERANCE:
                return f"{cpu} is wrong: hidden states of a stock Llama differ from SDPA's by {gap:.2g}"
    except Exception as error:
        return f"{cpu} fails: {type(error).__name__}"
    finally:
        torch._dynamo.reset()  # else the next call is compiled for any shape, which torch 2.13 cannot on a CPU
    return None


@torch.no_grad()
def flex_gaps() -> Iterator[float]:
    """Yield by how much flex attention's hidden states differ from SDPA's, of a tiny stock Llama, run by run."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=2 * FLEX_TOKENS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = LlamaModel(config).eval()
        ids = torch.arange(2 * FLEX_TOKENS).view(2, FLEX_TOKENS)  # (B, T)
        expected = model(ids, use_cache=False).last_hidden_state
        model.set_attn_implementation("flex_attention")
        for _ in range(FLEX_RUNS):
            states = model(ids, use_cache=False).last_hidden_state
            yield (states - expected).abs().max().item()


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

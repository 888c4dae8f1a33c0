"""With what a result was computed: versions, machine; transformers' chatter switched off."""

import importlib.metadata
import os
import platform
from contextlib import contextmanager

import torch
from pydantic import BaseModel
from transformers.utils import logging as transformers_logging

PACKAGES = ("crosslayer", "torch", "transformers", "tokenizers", "safetensors", "numpy")


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


@contextmanager
def quiet_transformers():
    """Silence transformers' own warnings and progress bars inside the block; restore them afterwards."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()

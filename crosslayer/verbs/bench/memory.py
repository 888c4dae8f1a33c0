"""Free memory, the peak of what is used, and whether a setting fits, asked before it is run."""

import contextlib
import ctypes
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from crosslayer.verbs.bench.costs import Load, Structure
from crosslayer.verbs.bench.record import Side

Models = Mapping[Side, PreTrainedModel]
GROUP = Path("/sys/fs/cgroup")
LIMITS = (  # of a control group, what it uses, and what of that is cached files, given up when needed: version 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(device: torch.device) -> float:
    """Return bytes that can still be allocated; in a container no more than its limit leaves."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    available = psutil.virtual_memory().available  # which knows nothing of this process's control group
    for limit, usage, cached in LIMITS:
        with contextlib.suppress(OSError, ValueError):
            free = int((GROUP / limit).read_text()) - int((GROUP / usage).read_text())
            statistics = (GROUP / usage).with_name("memory.stat")
            words = statistics.read_text().split() if statistics.is_file() else []
            return min(available, free + (int(words[words.index(cached) + 1]) if cached in words else 0))
    return available


@dataclass
class Peak:
    """The largest memory in use inside the block above what was in use before; `reason` says why it is unknown."""

    bytes: int | None = None
    reason: str | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure peak memory: what is allocated on a GPU, the resident set on a CPU (Linux)."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    try:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # give back what is free, or the block would use it unseen
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
        before = _resident_peak()
    except (OSError, TypeError):
        peak.reason = "this system does not tell the peak of a process's memory over a part of its run"
        yield peak
        return
    yield peak
    peak.bytes = _resident_peak() - before


def _resident_peak() -> int:
    """Return the largest resident set since the last reset, in bytes; psutil does not tell it on Linux."""
    line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if line is None:
        raise OSError("no VmHWM")
    return int(line[1]) * 1024


def too_large(models: Models, structures: Mapping[Side, Structure], load: Load, evicts: bool = False) -> str | None:
    """Return why a setting is skipped: the caches, a prompt's activations and logits would not fit in free memory.

    Where the candidate `evicts`, its prompt needs a mask for each head besides, and its cache is at most the full one.
    """
    if not structures:
        return None
    free = free_memory(models["baseline"].device)
    caches = [structure.cache_bytes(load.batch, load.total) for structure in structures.values()]
    tokens = load.batch * load.context
    activations = max(_activation_bytes(structure, tokens) for structure in structures.values())
    logits = max(load.batch * model.config.get_text_config().vocab_size * 8 for model in models.values())
    need = sum(caches) + max(caches) + activations + logits
    if evicts:  # booleans, which eviction makes, and the same as sdpa adds it
        model = models["candidate"]
        heads = model.config.get_text_config().num_attention_heads
        need += load.batch * heads * load.context**2 * (2 + model.dtype.itemsize)
    if need <= free:
        return None
    setting = f"context {load.context}, batch {load.batch}"
    return f"{setting} needs about {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def _activation_bytes(structure: Structure, tokens: int) -> int:
    """Return about what an MLP's products and the streams around it take."""
    outputs, inputs = structure.shape
    return tokens * (3 * outputs + 4 * inputs) * structure.itemsize


def eager_skip(model: PreTrainedModel, load: Load) -> str | None:
    """Return why eager attention is not run: two copies of a layer's maps exceed half of the free memory."""
    heads, free = model.config.get_text_config().num_attention_heads, free_memory(model.device)
    need = 2 * load.batch * heads * load.context**2 * 4
    if need <= free / 2:
        return None
    return f"skipped: eager maps need {need / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB free"

"""Free memory, peak memory, and whether a configuration will fit, checked before it runs."""

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
from crosslayer.verbs.bench.record import Role

Models = Mapping[Role, PreTrainedModel]
GROUP = Path("/sys/fs/cgroup")
LIMITS = (  # limit of a control group, its usage, and the reclaimable file cache in that: versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(device: torch.device) -> float:
    """Return bytes that can still be allocated, within the limit of a container."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    available = psutil.virtual_memory().available  # ignores the limit of this process's control group
    for limit, usage, cached in LIMITS:
        with contextlib.suppress(OSError, ValueError):
            free = int((GROUP / limit).read_text()) - int((GROUP / usage).read_text())
            statistics = (GROUP / usage).with_name("memory.stat")
            fields = statistics.read_text().split() if statistics.is_file() else []
            return min(available, free + (int(fields[fields.index(cached) + 1]) if cached in fields else 0))
    return available


@dataclass
class Peak:
    """Peak memory inside the block above what was in use before; `reason` says why it is unknown."""

    bytes: int | None = None
    reason: str | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure peak memory: allocated bytes on a GPU, the resident set on a CPU (Linux)."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    try:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # return freed memory, or the block would reuse it uncounted
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident set
        before = _resident_peak()
    except (OSError, TypeError):
        peak.reason = "this system does not report a process's peak memory for part of its run"
        yield peak
        return
    yield peak
    peak.bytes = _resident_peak() - before


def _resident_peak() -> int:
    """Return the largest resident set since the last reset, in bytes; psutil does not report it on Linux."""
    line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if line is None:
        raise OSError("no VmHWM")
    return int(line[1]) * 1024


def too_large(models: Models, structures: Mapping[Role, Structure], load: Load, evicts: bool = False) -> str | None:
    """Return why a configuration is skipped: caches, activations and logits would not fit in free memory.

    If the candidate `evicts`, its prompt also needs a mask for each head, and its cache is at most the full one.
    """
    if not structures:
        return None
    free = free_memory(models["baseline"].device)
    caches = [structure.cache_bytes(load.batch, load.total) for structure in structures.values()]
    tokens = load.batch * load.context
    activations = max(_activation_bytes(structure, tokens) for structure in structures.values())
    logits = max(load.batch * model.config.get_text_config().vocab_size * 8 for model in models.values())
    need = sum(caches) + max(caches) + activations + logits
    if evicts:  # the boolean mask that eviction makes, and the additive one that sdpa makes of it
        model = models["candidate"]
        heads = model.config.get_text_config().num_attention_heads
        need += load.batch * heads * load.context**2 * (2 + model.dtype.itemsize)
    if load.attention == "eager":  # two copies of a layer's maps
        heads = max(layer.heads for structure in structures.values() for layer in structure.attention)
        need += 2 * load.batch * heads * load.context**2 * 4
    if need <= free:
        return None
    return (
        f"context {load.context}, batch {load.batch} needs about {need / 1e9:.1f} GB of memory with {load.attention} "
        f"attention, and {free / 1e9:.1f} GB are free"
    )


def _activation_bytes(structure: Structure, tokens: int) -> int:
    """Return roughly how many bytes an MLP's activations and the residual streams around it take."""
    outputs, inputs = structure.shape
    return tokens * (3 * outputs + 4 * inputs) * structure.itemsize

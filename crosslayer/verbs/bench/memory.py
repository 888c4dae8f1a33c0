"""Free memory, and the peak of what is used."""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

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
    return min(psutil.virtual_memory().available, _group_free())


def _group_free() -> float:
    """Return bytes left under the limit of this process's control group, of which psutil knows nothing."""
    for limit, usage, cached in LIMITS:
        with contextlib.suppress(OSError, ValueError):
            free = int((GROUP / limit).read_text()) - int((GROUP / usage).read_text())
            return free + _stated((GROUP / usage).with_name("memory.stat"), cached)
    return float("inf")


def _stated(path: Path, name: str) -> int:
    """Return a number of a control group's statistics; 0 where there are none."""
    words = path.read_text().split() if path.is_file() else []
    return int(words[words.index(name) + 1]) if name in words else 0


class Peak:
    """The largest memory in use inside the block above what was in use before; `reason` says why it is unknown."""

    def __init__(self):
        self.bytes: int | None = None
        self.reason: str | None = None


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

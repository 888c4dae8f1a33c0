"""What a computation takes of this machine: free memory, the peak memory of a block, seconds of a call, FLOP/s."""

import contextlib
import ctypes
import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

GROUP = Path("/sys/fs/cgroup")
# limit of a control group, its usage, and the reclaimable file cache in that: versions 2 and 1
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
ROWS, MANY_ROWS = 1024, 8192  # of the square matrices whose product is timed: on a CPU, on a GPU


def free_memory(device: torch.device) -> float:
    """Return bytes that can still be allocated, within the limit of a container."""
    if device.type == "cuda":
        # torch keeps freed blocks: to the driver they are in use
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    # psutil ignores the limit of this process's control group, such as a container's
    available = psutil.virtual_memory().available
    for limit, usage, cached in LIMITS:
        with contextlib.suppress(OSError, ValueError):
            free = int((GROUP / limit).read_text()) - int((GROUP / usage).read_text())
            file = (GROUP / usage).with_name("memory.stat")
            fields = file.read_text().split() if file.is_file() else []
            return min(available, free + (int(fields[fields.index(cached) + 1]) if cached in fields else 0))
    return available


@dataclass
class Peak:
    """Peak memory inside the block above what was in use before; `reason` says why it is unknown."""

    bytes: int | None = None
    reason: str | None = None


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32, not in TF32, which Trainer turns on for the whole process on a GPU."""
    backends: Any = torch.backends
    before = backends.cuda.matmul.fp32_precision
    backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        # "none" follows the setting of all backends; the value that was read would fix it
        backends.cuda.matmul.fp32_precision = "none" if before == backends.fp32_precision else before


@contextlib.contextmanager
def float32_sums() -> Iterator[None]:
    """Sum the products of float16 matrices in float32 on a GPU; parts of sums may be float16 otherwise."""
    backends: Any = torch.backends
    before = backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction = before


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
        # return freed memory, or the block would reuse it uncounted
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        # resets the peak to the current resident set
        Path("/proc/self/clear_refs").write_text("5")
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


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return how long a call takes in seconds, including its work on the device."""
    # a GPU works on after the call returns: without waiting, only the launch is timed
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


@functools.cache
def matrix_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large product of square matrices, the median of five measurements, made once a process."""
    size = ROWS if device.type == "cpu" else MANY_ROWS
    left = torch.full((size, size), 0.5, device=device, dtype=dtype)
    right = left.clone()
    times = [seconds(lambda: left @ right, device) for _ in range(6)]
    # the first is slower
    return 2 * size**3 / statistics.median(times[1:])

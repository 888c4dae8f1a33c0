"""What the machine does in this run: rates of the kernels that a model calls, free memory, peak memory.

Every rate is of the sizes and the dtype that are about to be measured, since a rate depends on them: products of few
rows read memory far below the speed of a plain copy, and short prompts waste half of causal attention's blocks.
"""

import contextlib
import ctypes
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from crosslayer.benchmark.costs import Load, Rates, Structure

BUFFER = 256 * 2**20  # bytes to stream over: well above a last-level cache
LONGEST = 4096  # tokens of the prompt at which rates are measured: longer ones run at the same rate
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
}


def wait(device: torch.device) -> None:
    """Wait for the device, so that times are of the work and not of its launch."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return how long a call takes, its work on the device included."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


class _Counter(TorchDispatchMode):
    """Counts the operators that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(work: Callable[[], Any]) -> int:
    """Return how many operators a call runs."""
    with _Counter() as counter:
        work()
    return counter.count


@torch.no_grad()
def measure_rates(model: Structure, load: Load, target: PreTrainedModel, attention: str) -> Rates:
    """Measure the rates for one setting with buffers of a model's shapes; takes a second or a few on a CPU.

    `target` gives device and dtype. Attention is that of the implementation named, called alone.
    """
    device, dtype = target.device, target.dtype

    def made(*sizes: int) -> Tensor:
        return torch.full(sizes, 0.5, device=device, dtype=dtype)

    return Rates(
        matrices=_matrices(model, load, made),
        attention=_attention(model, load, made, attention),
        weights=_weights(model, load, made),
        states=_states(model, load, made, attention),
        copies=_copies(model, load, made),
        operator=_operator(device, dtype),
        asynchronous=device.type == "cuda",
    )


def _median(work: Callable[[], Any], device: torch.device) -> float:
    work()
    return statistics.median(seconds(work, device) for _ in range(3))


def _matrices(model: Structure, load: Load, made: Callable[..., Tensor]) -> float:
    """Return FLOP/s of the largest matrix on the prompt's rows."""
    rows, (outputs, inputs) = min(load.batch * load.context, LONGEST), model.shape
    x, weight = made(rows, inputs), made(outputs, inputs)
    return 2 * rows * inputs * outputs / _median(lambda: functional.linear(x, weight), x.device)


def _weights(model: Structure, load: Load, made: Callable[..., Tensor]) -> float:
    """Return bytes/s of weights that are multiplied with as many rows as sequences are decoded."""
    outputs, inputs = model.shape
    size = outputs * inputs * model.itemsize
    buffers = [made(outputs, inputs) for _ in range(max(1, min(BUFFER, model.weight_bytes()) // size))]
    x = made(load.batch, 1, inputs)
    return len(buffers) * size / _median(lambda: [functional.linear(x, weight) for weight in buffers], x.device)


def _interface(name: str, heads: int, kv_heads: int) -> tuple[Callable, Any]:
    """Return an attention function, and what it takes for its module."""
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True, training=False)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward), module


def _attention(model: Structure, load: Load, made: Callable[..., Tensor], name: str) -> float:
    """Return FLOP/s of causal attention over the prompt, those of pairs that may attend."""
    layer, tokens = model.attention[0], min(load.context, LONGEST)
    attend, module = _interface(name, layer.heads, layer.kv_heads)
    q, k = made(1, layer.heads, tokens, layer.key_size), made(1, layer.kv_heads, tokens, layer.key_size)
    v = made(1, layer.kv_heads, tokens, layer.value_size)
    work = 2 * (tokens * (tokens + 1) // 2) * layer.heads * (layer.key_size + layer.value_size)
    mask = None
    if name == "eager":  # it knows no causality of its own
        mask = torch.full((tokens, tokens), torch.finfo(q.dtype).min, device=q.device, dtype=q.dtype).triu(1)[
            None, None
        ]
    options = {"scaling": layer.key_size**-0.5, "dropout": 0.0}
    return work / _median(lambda: attend(module, q, k, v, mask, **options), q.device)


def _states(model: Structure, load: Load, made: Callable[..., Tensor], name: str) -> float:
    """Return bytes/s of keys and values that one query of each sequence attends to."""
    layer, length = model.attention[0], load.total
    attend, module = _interface(name, layer.heads, layer.kv_heads)
    k, v = (load.batch, layer.kv_heads, length, layer.key_size), (load.batch, layer.kv_heads, length, layer.value_size)
    size = load.batch * layer.read(length) * model.itemsize
    pairs = [(made(*k), made(*v)) for _ in range(max(1, min(len(model.attention), BUFFER // size)))]
    q, options = made(load.batch, layer.heads, 1, layer.key_size), {"scaling": 1.0, "dropout": 0.0}
    work = _median(lambda: [attend(module, q, *pair, None, **options) for pair in pairs], q.device)
    return len(pairs) * size / work


def _copies(model: Structure, load: Load, made: Callable[..., Tensor]) -> float:
    """Return bytes/s, read and written, of appending one token as a dynamic cache does: into fresh memory."""
    layer = model.attention[0]
    old, new = made(load.batch, layer.kv_heads, load.total, layer.key_size), (load.batch, layer.kv_heads, 1)
    token, count = made(*new, layer.key_size), max(2, min(2 * len(model.attention), BUFFER // old.nbytes))
    states = [old.clone() for _ in range(count)]

    def step() -> None:
        for i in range(count):
            states[i] = torch.cat([states[i], token], dim=-2)

    return 2 * count * old.nbytes / _median(step, old.device)


def _operator(device: torch.device, dtype: torch.dtype) -> float:
    """Return seconds an operator costs beside its work: a decoding step of a Llama too small to compute anything."""
    with torch.random.fork_rng():
        small = LlamaForCausalLM(LlamaConfig(**SMALL)).to(device, dtype).eval()  # type: ignore[call-overload]
    token, cache = torch.ones(1, 1, dtype=torch.long, device=device), DynamicCache(config=small.config)

    def step() -> None:
        small(token, past_key_values=cache, use_cache=True)

    count = operators(step)
    return statistics.median(seconds(step, device) for _ in range(30)) / count


def free_memory(device: torch.device) -> float | None:
    """Return bytes that can still be allocated, or None where the system does not say."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return None if found is None else min(int(found[1]) * 1024, _group_free())


def _group_free() -> float:
    """Return bytes left under the limit of this process's control group; infinite where there is none."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            group = Path("/sys/fs/cgroup")
            return int((group / limit).read_text()) - int((group / usage).read_text())
    return float("inf")


class Peak:
    """The largest memory in use inside the block above what was in use before; `reason` says why it is unknown."""

    def __init__(self, device: torch.device):
        self.device = device
        self.bytes: int | None = None
        self.reason: str | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure peak memory: what is allocated on a GPU, the resident set on a CPU (Linux)."""
    peak = Peak(device)
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
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError("no VmHWM")
    return int(found[1]) * 1024

"""The rates that the machine reaches in this run, in the kernels that a model calls; timing and counting of calls.

Rates are measured at the sizes and the dtype of the benchmark, since they depend on both: products of few rows read
memory far more slowly than a plain copy, and short prompts waste half of causal attention's blocks.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from crosslayer.core.transformers_versions import CACHE
from crosslayer.quantization.cache import QuantisedLayer, Reading
from crosslayer.verbs.bench.costs import Load, Rates, Structure
from crosslayer.wiring.kv_bits import RECENT

BUFFER = 256 * 2**20  # bytes to stream over: well above a last-level cache
LONGEST = 4096  # prompt tokens at which rates are measured at most: longer prompts run at the same rate
SMALL = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 64) | {
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
}


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return how long a call takes in seconds, including its work on the device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
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
def measure_rates(model: Structure, load: Load, target: PreTrainedModel, quantised: Structure | None = None) -> Rates:
    """Measure the rates for a configuration with buffers of a model's shapes; takes a few seconds on a CPU.

    `target` gives device and dtype. The attention implementation is called by itself. `quantised` is a model with
    a quantised cache, for the rate at which that is read.
    """
    device, dtype = target.device, target.dtype

    def filled(*sizes: int) -> Tensor:
        return torch.full(sizes, 0.5, device=device, dtype=dtype)

    products, weights = _matrices(model, load, filled)
    return Rates(
        matrices=products,
        attention=_attention(model, load, filled, load.attention),
        weights=weights,
        states=_states(model, load, filled, load.attention),
        copies=_copies(model, load, filled),
        operator=_operator(device, dtype),
        decoding=None if quantised is None else _decoding(quantised, load, filled),
        asynchronous=device.type == "cuda",
    )


def _median(work: Callable[[], Any], device: torch.device) -> float:
    work()
    return statistics.median(seconds(work, device) for _ in range(3))


def _matrices(model: Structure, load: Load, filled: Callable[..., Tensor]) -> tuple[float, float]:
    """Return FLOP/s of the largest matrix on the prompt's rows, and bytes/s of weights with one row per sequence."""
    rows, (outputs, inputs) = min(load.batch * load.context, LONGEST), model.shape
    x, row, weight = filled(rows, inputs), filled(load.batch, 1, inputs), filled(outputs, inputs)
    prompt = _median(lambda: functional.linear(x, weight), x.device)
    size = outputs * inputs * model.itemsize
    buffers = [filled(outputs, inputs) for _ in range(max(1, min(BUFFER, model.weight_bytes()) // size))]
    step = _median(lambda: [functional.linear(row, weight) for weight in buffers], x.device)
    return 2 * rows * inputs * outputs / prompt, len(buffers) * size / step


def _interface(name: str, heads: int, kv_heads: int) -> Callable[..., Any]:
    """Return an attention function, called with a module of no model."""
    module = nn.Module().eval()
    module.num_key_value_groups, module.is_causal = heads // kv_heads, True  # type: ignore[assignment]
    return partial(ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward), module)


def _attention(model: Structure, load: Load, filled: Callable[..., Tensor], name: str) -> float:
    """Return FLOP/s of causal attention over the prompt, counting only pairs below the diagonal."""
    layer, tokens = model.attention[0], min(load.context, LONGEST)
    attend = _interface(name, layer.heads, layer.kv_heads)
    q, k = filled(1, layer.heads, tokens, layer.key_size), filled(1, layer.kv_heads, tokens, layer.key_size)
    v = filled(1, layer.kv_heads, tokens, layer.value_size)
    work = 2 * (tokens * (tokens + 1) // 2) * layer.heads * (layer.key_size + layer.value_size)
    mask = None
    if name == "eager":  # it is not causal without a mask
        mask = q.new_full((1, 1, tokens, tokens), torch.finfo(q.dtype).min).triu(1)
    return work / _median(lambda: attend(q, k, v, mask, scaling=layer.key_size**-0.5, dropout=0.0), q.device)


def _states(model: Structure, load: Load, filled: Callable[..., Tensor], name: str) -> float:
    """Return bytes/s of keys and values that a query of each sequence attends to."""
    layer, length = model.attention[0], load.total
    attend = _interface(name, layer.heads, layer.kv_heads)
    k, v = (load.batch, layer.kv_heads, length, layer.key_size), (load.batch, layer.kv_heads, length, layer.value_size)
    size = load.batch * layer.read(length) * model.itemsize
    pairs = [(filled(*k), filled(*v)) for _ in range(max(1, min(len(model.attention), BUFFER // size)))]
    q = filled(load.batch, layer.heads, 1, layer.key_size)
    work = _median(lambda: [attend(q, *pair, None, scaling=1.0, dropout=0.0) for pair in pairs], q.device)
    return len(pairs) * size / work


def _copies(model: Structure, load: Load, filled: Callable[..., Tensor]) -> float:
    """Return bytes/s, read and written, of appending a token as a dynamic cache does: into fresh memory."""
    layer = model.attention[0]
    old = filled(load.batch, layer.kv_heads, load.total, layer.key_size)
    token, count = old[:, :, :1].clone(), max(2, min(2 * len(model.attention), BUFFER // old.nbytes))
    states = [old.clone() for _ in range(count)]

    def step() -> None:
        for i in range(count):
            states[i] = torch.cat([states[i], token], dim=-2)

    return 2 * count * old.nbytes / _median(step, old.device)


def _decoding(model: Structure, load: Load, filled: Callable[..., Tensor]) -> float | None:
    """Return elements/s of quantised keys and values that a cache gives when a token comes; None if it has none."""
    layers, sizes = [], []
    for attention in model.attention:
        if attention.kind is not None and any(attention.stored):
            layers.append(QuantisedLayer(attention.kind, Reading(RECENT)))
            shares = zip(attention.stored, (attention.key_size, attention.value_size), strict=True)
            sizes.append([attention.kv_heads, *(round(share * size) for share, size in shares)])
    if not layers:
        return None

    def step(tokens: int) -> None:
        for layer, (heads, keys, values) in zip(layers, sizes, strict=True):
            layer.update(filled(load.batch, heads, tokens, keys), filled(load.batch, heads, tokens, values))

    step(load.total)
    return model.decoded(load.batch, load.total) / _median(partial(step, 1), filled(1).device)


def _operator(device: torch.device, dtype: torch.dtype) -> float:
    """Return the fixed seconds per operator: from a decoding step of a Llama so small that its work takes no time."""
    with torch.random.fork_rng():
        small = LlamaForCausalLM(LlamaConfig(**SMALL)).to(device, dtype).eval()  # type: ignore[call-overload]
    token, cache = torch.ones(1, 1, dtype=torch.long, device=device), DynamicCache(config=small.config)
    step = partial(small, token, **{CACHE: cache}, use_cache=True)
    count = operators(step)
    return statistics.median(seconds(step, device) for _ in range(30)) / count

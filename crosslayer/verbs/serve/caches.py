"""Which layers of a model share a cache in vLLM, and which models vLLM cannot serve; nothing here imports vLLM."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.families import is_rope_by_type
from crosslayer.core.method import FROM_VALUES, Method, Mixing, StateReader
from crosslayer.core.plan import CACHED
from crosslayer.output.formatting import ranges

TENSOR_PARALLEL = "tensor-parallel-size"
CACHE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
# vLLM flags that crosslayer models are refused with: values that are allowed, and the reason for refusing others.
# Several would give wrong text without any error, so flags are allowed after a comparison with our own forward pass.
UNTESTED = {
    TENSOR_PARALLEL: (("1", "2"), "tensor parallelism over more than 2 processes is untested"),
    "pipeline-parallel-size": (
        ("1",),
        "layers read states of layers that pipeline parallelism puts elsewhere; use --tensor-parallel-size 2",
    ),
    "quantization": (
        ("compressed-tensors",),
        "weights quantized in this way are untested; use int8 weights and activations (compressed-tensors)",
    ),
    "kv-cache-dtype": (
        ("auto", *CACHE_TYPES, *FP8),
        "this type of KV cache is untested, and vLLM's CPU kernels read it wrongly; fp8 and fp8_e5m2 are tested",
    ),
    "kv-cache-dtype-skip-layers": ((), "layers that share a KV cache would read it as different types"),
    "kv-sharing-fast-prefill": ((), "with kv_sharing_fast_prefill, some layers would see only the last token"),
    "enable-lora": ((), "LoRA adapters are untested; merge them into the weights"),
}


def cache_source(config: CrossLayerConfig, layer: int) -> int | None:
    """Return the layer whose cache in vLLM a layer reads: itself, or the source of its keys and values; None: no cache.

    vLLM stores the keys and values that an attention layer reads together. So a layer reads another layer's cache if
    both its keys and its values come from that layer, unless the source itself reads several layers. A layer with only
    keys or only values from another layer has a cache of its own with both.
    """
    plan, several = config.plan, config.wiring.reads_several
    if not plan.attends(layer):
        return None
    sources = {plan.reads(state, layer) for state in CACHED}
    if len(sources) > 1 or several[layer]:
        return layer
    (source,) = sources.pop()
    # A source that reads several layers caches their mixture, and not its own keys and values.
    return layer if several[source] else source


def not_saved(config: CrossLayerConfig) -> str | None:
    """Return a sentence on cache memory that the plan saves and vLLM does not; None if vLLM saves all of it."""
    wiring = config.wiring
    caching = [layer for layer in range(config.num_hidden_layers) if cache_source(config, layer) == layer]
    wasting = [layer for layer in caching if len(wiring.plan.stored(layer)) < len(CACHED)]
    if not wasting:
        return None
    return (
        f"vLLM stores keys and values together, so layers {ranges(wasting)} store both, though the plan stores less; "
        "outputs are the same."
    )


def not_servable(config: CrossLayerConfig) -> str | None:
    """Return why vLLM cannot serve a crosslayer model, None if it can."""
    if config.linear_layers:
        return (
            f"layers {ranges(list(config.linear_layers))} have linear attention, whose state the plugin does not cache"
        )
    if config.plan.beyond_sharing:
        return f"{config.plan.beyond_sharing}, and vLLM's attention reads keys and values of all tokens"
    for method, layer, module in _modules(config):
        if isinstance(module, StateReader) and module.needs_mask:
            return f"with {method.name()}, layer {layer} reads several caches, but vLLM's attention reads only one"
    if config.num_local_experts is not None:
        return "mixtures of experts are untested"
    if "vllm" not in config.components.supports:
        return f"family {config.family!r} is untested"
    if is_rope_by_type(config.rope_parameters):
        return "rope_parameters by layer type are untested"
    return None


def _modules(config: CrossLayerConfig) -> Iterator[tuple[Method, int, Mixing]]:
    """Yield the modules of methods within attention, without memory, each with its method and layer."""
    wiring = config.wiring
    for method in config.methods:
        for layer in filter(config.plan.attends, range(config.num_hidden_layers)):
            with torch.device("meta"):  # only their kind is asked for
                reader = method.reader(config, wiring, layer) if wiring.reads_several[layer] else None
                modules = method.heads(config, wiring, layer), reader
            yield from ((method, layer, module) for module in modules if module is not None)


def untested(config: CrossLayerConfig, flags: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first vLLM flag (without dashes) that a crosslayer model is refused with, and the reason."""
    for name, (allowed, reason) in UNTESTED.items():
        if name in flags and flags[name] not in allowed:
            return name, reason

    # vLLM splits linear layers and attention heads over processes; each of them has other modules whole.
    ranks = int(flags.get(TENSOR_PARALLEL, "1"))
    if ranks == 1:
        return None
    heads = config.num_key_value_heads
    assert heads is not None
    reason = None
    if heads % ranks:
        reason = f"its {heads} key-value heads cannot be divided among {ranks} processes"
    elif FROM_VALUES in config.wiring.compensation:
        reason = "its W_c reads the values of all heads, which vLLM splits"
    else:
        split = next(((method, layer) for method, layer, module in _modules(config) if module.split_by_head), None)
        if split is not None:
            method, layer = split
            reason = f"{method.name()} has parameters of each head in layer {layer}, which vLLM does not split"
    return None if reason is None else (TENSOR_PARALLEL, f"{reason}; use one process")


def flags_of(vllm_config: Any) -> dict[str, str]:
    """Return the options of a running vLLM that are checked here and for stores, as flags without dashes, if set."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    values = {
        TENSOR_PARALLEL: parallel.tensor_parallel_size,
        "pipeline-parallel-size": parallel.pipeline_parallel_size,
        "decode-context-parallel-size": parallel.decode_context_parallel_size,
        "kv-cache-dtype": cache.cache_dtype,
        "kv-cache-dtype-skip-layers": cache.kv_cache_dtype_skip_layers,
        "kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "quantization": model.quantization,
        "hf-overrides": model.hf_overrides,
        "speculative-config": vllm_config.speculative_config,
        "enable-lora": vllm_config.lora_config,
    }
    return {name: str(value) for name, value in values.items() if value}


def cache_item(flags: Mapping[str, str], dtype: torch.dtype) -> int:
    """Return the bytes of a number in vLLM's KV cache, by its flags (without dashes) and the dtype of the weights."""
    kind = flags.get("kv-cache-dtype", "auto")
    return 1 if kind in FP8 else CACHE_TYPES.get(kind, dtype).itemsize


def bytes_per_token(config: CrossLayerConfig, item: float) -> float:
    """Return the bytes of keys and values that vLLM stores per token over all caches, with `item` bytes per number."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    caches = sum(cache_source(config, layer) == layer for layer in range(config.num_hidden_layers))
    return caches * 2 * config.num_key_value_heads * config.head_dim * item

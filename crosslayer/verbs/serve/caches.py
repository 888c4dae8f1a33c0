"""Which layers of a model share a cache in vLLM, and which models vLLM cannot serve; nothing here imports vLLM."""

from collections.abc import Mapping

import torch

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.plan import CACHED
from crosslayer.output.formatting import ranges

SPLIT = "tensor and pipeline parallelism are untested"
# vLLM flags that crosslayer models are refused with: values that are allowed, and the reason for refusing others
UNTESTED = {
    "tensor-parallel-size": (("1",), SPLIT),
    "pipeline-parallel-size": (("1",), SPLIT),
    "quantization": ((), "quantised weights are untested"),
    "kv-cache-dtype": (("auto", "float32", "bfloat16", "float16"), "a quantised KV cache is untested"),
    "kv-sharing-fast-prefill": ((), "with kv_sharing_fast_prefill some layers would see only the last token"),
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
    return layer if several[source] else source


def not_saved(config: CrossLayerConfig) -> str | None:
    """Return a sentence on cache memory that the plan saves and vLLM does not; None if vLLM saves all of it."""
    wiring = config.wiring
    caching = [layer for layer in range(config.num_hidden_layers) if cache_source(config, layer) == layer]
    shares = wiring.plan.value_shares
    wasting = [layer for layer in caching if len(wiring.plan.stored(layer)) < len(CACHED) or shares[layer] < 1]
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
    for method in config.methods:
        for layer in range(config.num_hidden_layers):
            with torch.device("meta"):
                reader = method.reader(config, config.wiring, layer) if config.wiring.reads_several[layer] else None
            if reader is not None and reader.needs_mask:
                return f"with {method.name()} layer {layer} reads several caches, and vLLM's attention reads only one"
    if config.num_local_experts is not None:
        return "mixtures of experts are untested"
    if "vllm" not in config.components.supports:
        return f"family {config.family!r} is untested"
    return None


def untested(flags: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first vLLM flag (without dashes) that crosslayer models are refused with, and the reason."""
    for name, (allowed, reason) in UNTESTED.items():
        if name in flags and flags[name] not in allowed:
            return name, reason
    return None


def bytes_per_token(config: CrossLayerConfig, item: int) -> int:
    """Return the bytes of keys and values that vLLM stores per token over all caches, with `item` bytes per number."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    caches = sum(cache_source(config, layer) == layer for layer in range(config.num_hidden_layers))
    return caches * 2 * config.num_key_value_heads * config.head_dim * item

"""Which layers of a model share a cache in vLLM, and what vLLM cannot serve; nothing here imports vLLM."""

from collections.abc import Mapping

import torch

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.plan import CACHED
from crosslayer.output.formatting import ranges

SPLIT = "it is split over several devices (tensor or pipeline parallel), which has not been tried"
# flags of vLLM with which no model of ours is served: values that do not count, and the reason
UNTRIED = {
    "tensor-parallel-size": (("1",), SPLIT),
    "pipeline-parallel-size": (("1",), SPLIT),
    "quantization": ((), "its weights are quantised, which has not been tried"),
    "kv-cache-dtype": (
        ("auto", "float32", "bfloat16", "float16"),
        "its cache is quantised, which has not been tried",
    ),
    "kv-sharing-fast-prefill": ((), "with kv_sharing_fast_prefill some layers would see no tokens but the last"),
    "enable-lora": ((), "adapters (LoRA) beside it have not been tried; merge them into its weights"),
}


def cache_source(config: CrossLayerConfig, layer: int) -> int | None:
    """Return the layer whose cache in vLLM a layer reads: itself, or the source of its keys and values; None: none.

    vLLM stores keys and values together, as an attention layer reads them. So a layer reads another one's cache where
    both its states come from that layer, unless that one reads several. A layer of which only one state comes from
    elsewhere has a cache of its own with both.
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
    """Return in words what the plan saves of the cache and vLLM does not, None where there is nothing."""
    wiring = config.wiring
    caching = [layer for layer in range(config.num_hidden_layers) if cache_source(config, layer) == layer]
    shares = wiring.plan.value_shares
    wasting = [layer for layer in caching if len(wiring.plan.stored(layer)) < len(CACHED) or shares[layer] < 1]
    if not wasting:
        return None
    return (
        f"vLLM stores keys and values together: layers {ranges(wasting)} store both, though the plan stores less. What "
        "they compute is the same."
    )


def not_servable(config: CrossLayerConfig) -> str | None:
    """Return why vLLM cannot serve a model of ours, None if it can."""
    if config.linear_layers:
        return f"layers {ranges(list(config.linear_layers))} have linear attention, whose state it has no cache for"
    for method in config.methods:
        for layer in range(config.num_hidden_layers):
            with torch.device("meta"):
                reader = method.reader(config, config.wiring, layer) if config.wiring.reads_several[layer] else None
            if reader is not None and reader.needs_mask:
                return f"{method.name()} lets layer {layer} read several caches at once, and its attention reads one"
    if config.num_local_experts is not None:
        return "mixtures of experts have not been tried there"
    if "vllm" not in config.components.supports:
        return f"family {config.family!r} has not been tried there"
    return None


def untried(flags: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first flag of vLLM, by its name without dashes, that a model of ours is refused with, and why."""
    for name, (served, reason) in UNTRIED.items():
        if name in flags and flags[name] not in served:
            return name, reason
    return None


def bytes_per_token(config: CrossLayerConfig, item: int) -> int:
    """Return the bytes that vLLM stores for a token, with `item` bytes a number: keys and values of each own cache."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    caches = sum(cache_source(config, layer) == layer for layer in range(config.num_hidden_layers))
    return caches * 2 * config.num_key_value_heads * config.head_dim * item

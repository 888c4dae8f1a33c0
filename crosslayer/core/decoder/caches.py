"""Adapters to transformers' caches for layers that store a single state, or none."""

from collections.abc import Collection

from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache
from transformers.cache_utils import StaticLayer

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.transformers_versions import CACHES_KNOW_READERS, EMPTY_LAYER


def update_single(cache: Cache, state: Tensor, layer: int) -> Tensor:
    """Cache the only state (B, H_kv, T, D) that a layer stores; return cached and new tokens, (B, H_kv, S, D).

    Stored as keys, since caches measure their length by these, with values of head size 0. A cache that was allocated
    before the model was known (as torch.export needs it) has space for keys and values, and stores the state as both.
    """
    existing = cache.layers[layer] if layer < len(cache.layers) else None
    has_values = isinstance(existing, StaticLayer) and existing.is_initialized and existing.v_head_dim > 0
    return cache.update(state, state if has_values else state[..., :0], layer)[0]


def without_empty_layers(cache: Cache | None) -> Cache | None:
    """Return the cache without layers of length 0, from which masks can take their size.

    transformers' wrapper for torch.export inserts such a layer for each layer that stores nothing.
    """
    if cache is None or all(layer.get_max_length() for layer in cache.layers):
        return cache
    return Cache(layers=[layer for layer in cache.layers if layer.get_max_length()])


def fit_cache(config: CrossLayerConfig, cache: Cache, empty: Collection[int]) -> None:
    """Mark the layers that store nothing, or linear attention's state, in a cache made without the config.

    Otherwise the length of the cache, which is that of its first layer, could be 0. This concerns caches made without a
    config, and all caches before transformers 5.23. Memory that is allocated already is not changed. `empty` are the
    layers that store nothing.

    Raises:
        ValueError: the cache is quantized and a layer does not store both keys and values; or, before 5.23, it is
            offloaded and a layer stores nothing.
    """
    if isinstance(cache, QuantizedCache):
        check_quantized(config)
    if cache.layers and all(getattr(layer, "is_initialized", True) for layer in cache.layers):  # linear ones have none
        return
    if empty and cache.offloading and not CACHES_KNOW_READERS:  # there it counts layers
        raise ValueError("if layers store nothing, an offloaded cache needs transformers 5.23; use the default cache")
    if cache.layer_class_to_replicate is not None and not cache.layers:
        layer_types, new = config.layer_types or [], cache.layer_class_to_replicate
        linear = DynamicCache(config=config).layers if config.linear_layers else []
        cache.layers = [
            linear[i] if layer_type == "linear_attention" else new() for i, layer_type in enumerate(layer_types)
        ]
    for layer in empty:
        if not getattr(cache.layers[layer], "is_initialized", True):
            cache.layers[layer] = EMPTY_LAYER()


def check_quantized(config: CrossLayerConfig) -> None:
    """Refuse a quantized cache, before it is built, if layers do not store both keys and values.

    Raises:
        ValueError: some layers store less; the message names the methods.
    """
    plan = config.plan
    partial = [layer for layer in range(plan.layers) if len(plan.stored(layer)) < 2]
    if partial:
        names = " + ".join(method.name() for method in config.methods)
        raise ValueError(
            f"{names}: transformers' quantized cache needs keys and values of every layer, and layers {partial} store "
            "less; use crosslayer.quantized_cache(model)"
        )

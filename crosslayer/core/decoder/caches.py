"""Adapters to transformers' caches for layers that store less than keys and values."""

from collections.abc import Collection

from transformers import Cache, DynamicCache, QuantizedCache

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.transformers_versions import CACHES_KNOW_READERS, EMPTY_LAYER


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
    # states of linear attention have no such attribute; memory that is allocated stays as it is
    if cache.layers and all(getattr(layer, "is_initialized", True) for layer in cache.layers):
        return
    # before 5.23 an offloaded cache fetches layers by counting them, those that store nothing too
    if empty and cache.offloading and not CACHES_KNOW_READERS:
        raise ValueError("if layers store nothing, an offloaded cache needs transformers 5.23; use the default cache")
    # Such a cache makes its layers, all of one class, when states come. Made here, each is of its layer's kind.
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

"""What transformers' caches need to be told about layers that store a single state, or none."""

from collections.abc import Collection

from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache
from transformers.cache_utils import StaticLayer

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.transformers_versions import CACHES_KNOW_READERS, EMPTY_LAYER


def update_both(cache: Cache, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Cache keys (B, H_kv, T, D) and values (B, h, T, D) of a layer; return them with what was cached, S tokens.

    Memory that is allocated in advance has the same number of heads for both. Where a layer has just h of the value
    heads for itself, each of its heads is laid out as H_kv / h narrower ones there. Memory that was allocated
    before anything was known of the model has room for all heads, and gets them again and again.
    """
    pieces = k.shape[1] // v.shape[1]
    if pieces == 1:
        return cache.update(k, v, layer)
    if _early_value_size(cache, layer) == v.shape[-1]:
        keys, values = cache.update(k, v.repeat(1, pieces, 1, 1), layer)
        return keys, values[:, : v.shape[1]]
    narrow = v.unflatten(-1, (pieces, -1)).transpose(2, 3).flatten(1, 2)  # (B, H_kv, T, D / pieces)
    keys, values = cache.update(k, narrow, layer)  # values (B, H_kv, S, D / pieces)
    return keys, values.unflatten(1, (-1, pieces)).transpose(2, 3).flatten(-2)


def update_single(cache: Cache, state: Tensor, layer: int) -> Tensor:
    """Cache the only state (B, H_kv, T, D) that a layer stores; return it with what was cached, (B, H_kv, S, D).

    It stands in the keys slot, which is where caches measure their length, beside a state of head size 0. Memory that
    was allocated before anything was known of the model (as torch.export needs it) has room for both, and gets both.
    """
    early = _early_value_size(cache, layer) > 0
    return cache.update(state, state if early else state[..., :0], layer)[0]


def _early_value_size(cache: Cache, layer: int) -> int:
    """Return the size of a value in memory that is allocated already; 0 where none is, or no values are held."""
    existing = cache.layers[layer] if layer < len(cache.layers) else None
    return existing.v_head_dim if isinstance(existing, StaticLayer) and existing.is_initialized else 0


def without_empty_layers(cache: Cache | None) -> Cache | None:
    """Return a cache by which masks can be sized: without layers of length 0.

    transformers' wrapper for torch.export puts such a layer wherever a layer stores nothing.
    """
    if cache is None or all(layer.get_max_length() for layer in cache.layers):
        return cache
    return Cache(layers=[layer for layer in cache.layers if layer.get_max_length()])


def fit_cache(config: CrossLayerConfig, cache: Cache, empty: Collection[int]) -> None:
    """Tell a cache that has not read it from the config which layers store nothing, or linear attention's state.

    Otherwise the first layer, by which lengths go, would stand for a cache without tokens. That concerns caches made
    without a config, and before transformers 5.23 all. Memory that is allocated already stays as it is. `empty` are the
    layers that store nothing.

    Raises:
        ValueError: a quantised cache, where a layer stores not both, keys and values; or before 5.23 an offloaded one,
            where a layer stores nothing.

    """
    if isinstance(cache, QuantizedCache):
        check_quantized(config)
    if cache.layers and all(getattr(layer, "is_initialized", True) for layer in cache.layers):  # linear ones have none
        return
    if empty and cache.offloading and not CACHES_KNOW_READERS:  # there it counts layers
        raise ValueError("an offloaded cache with layers that store nothing needs transformers 5.23")
    if cache.layer_class_to_replicate is not None and not cache.layers:
        kinds, new = config.layer_types or [], cache.layer_class_to_replicate
        linear = DynamicCache(config=config).layers if config.linear_layers else []
        cache.layers = [linear[i] if kind == "linear_attention" else new() for i, kind in enumerate(kinds)]
    for layer in empty:
        if not getattr(cache.layers[layer], "is_initialized", True):
            cache.layers[layer] = EMPTY_LAYER()


def check_quantized(config: CrossLayerConfig) -> None:
    """Refuse quantised caches where they cannot hold what layers store, before one is built.

    Raises:
        ValueError: a layer stores not both, keys and values; the methods are named.

    """
    plan = config.plan
    partial = [layer for layer in range(plan.layers) if len(plan.stored(layer)) < 2]
    if partial:
        names = " + ".join(method.name() for method in config.methods)
        raise ValueError(
            f"{names}: a quantised cache holds keys and values of every layer, and layers {partial} store less; "
            "use the default cache, or cache_implementation='static'"
        )


def cache_bytes(cache: Cache) -> int:
    """Return allocated bytes of a cache's states, from the storages; a shared storage counts once."""
    storages = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for pointer, size in storages.items() if pointer)

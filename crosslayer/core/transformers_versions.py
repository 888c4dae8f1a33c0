"""Differences between the supported versions of transformers, 5.19 to 5.24; checkpointing has a file of its own.

No other file checks the version, and this one imports no modeling code, which would cost `plan` seconds.

Each name gives the behavior of 5.24 in every version; its docstring names the first version that has it. The checks
test whether something exists rather than compare version numbers, so that builds between two releases work too.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

Forward = TypeVar("Forward", bound=Callable[..., Any])
CACHE = next(
    field.name for field in dataclasses.fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values")
)
"""Name of the cache among the arguments and outputs of models: `cache` (5.24), `past_key_values` before."""

CACHES_KNOW_READERS = hasattr(cache_utils, "DummyLayer")
"""Whether caches read which layers store nothing from `kv_sharing_modes` of a config (5.23)."""


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model by either name, None without one."""
    return next((arguments[name] for name in ("cache", "past_key_values") if arguments.get(name) is not None), None)


def takes_cache(forward: Forward) -> Forward:
    """Let a `forward` with a parameter `cache` take it by either name; from 5.24 on, the old one with a warning."""
    if CACHE == "cache":
        # transformers' own decorator: its models accept the old name with this warning until 5.40
        return deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)  # type: ignore[return-value]

    @functools.wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if CACHE in kwargs:
            kwargs["cache"] = kwargs.pop(CACHE)
        return forward(self, *args, **kwargs)

    # `generate` checks its arguments against the signature
    signature = inspect.signature(forward)
    parameters = [each.replace(name=CACHE) if each.name == "cache" else each for each in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed  # type: ignore[return-value]


def read_paged(cache: Any, k: Tensor, v: Tensor, layer: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a layer to attend to under continuous batching, new ones (B, H_kv, T, D) included.

    `options` are those of the attention function, and change; before 5.24 it reads the cache itself.
    """
    if CACHE == "cache":
        return cache.update(k, v, layer, options)
    options["cache"] = cache
    return k, v


def attention_that_caps(config: PreTrainedConfig, attention: str | None = None) -> str | None:
    """Return the attention implementation to load, None for the default: eager if `attention` cannot cap scores.

    Before 5.21 SDPA ran, even by default, for stock models whose config caps scores, and did not cap them. From 5.21
    on it is refused, and eager attention is the default.
    """
    caps = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if caps and attention in (None, "sdpa") else attention


def layers_without_cache(config: PreTrainedConfig) -> set[int]:
    """Return the layers that read another layer's keys and values, and store none, in caches.

    From 5.23 on `kv_sharing_modes` lists them; before, they are the last `num_kv_shared_layers` of Gemma 3n and 4. Our
    own configs have `kv_sharing_modes` in all versions.
    """
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return {layer for layer, mode in enumerate(modes) if mode not in (None, "store")}
    count = 0 if CACHES_KNOW_READERS else getattr(config, "num_kv_shared_layers", None) or 0
    return set(range(config.num_hidden_layers)[-count:]) if count else set()


class NoState:
    """The cache entry of a layer that stores nothing, as `DummyLayer` is from 5.23 on.

    It does not count as an attention layer of the cache, whose length is that of its first attention layer.
    """

    supports_early_init = False
    is_initialized = is_compileable = is_croppable = True
    keys = values = None
    # neither True nor False: caches look for the first layer of a kind, and other layers size the masks
    is_sliding = None

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def reset(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no states to move, to cut or to reorder."""

    offload = prefetch = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset


EMPTY_LAYER: type = cache_utils.DummyLayer if CACHES_KNOW_READERS else NoState
"""The class of cache entries for layers that store nothing; see `CACHES_KNOW_READERS`."""

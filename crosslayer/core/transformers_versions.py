"""Differences between the supported versions of transformers, 5.19 to 5.24; no other file checks the version.

Each name gives the behavior of 5.24 in every version; its docstring names the first version that has it. The checks
test whether something exists rather than compare version numbers, so that builds between two releases work too.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

Forward = TypeVar("Forward", bound=Callable[..., Any])
CACHE = next(
    field.name for field in dataclasses.fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values")
)
"""Name of the cache among the arguments and outputs of models: `cache` (5.24), `past_key_values` before."""

CACHES_KNOW_READERS = hasattr(cache_utils, "DummyLayer")
"""Whether caches read which layers store nothing from `kv_sharing_modes` of a config (5.23)."""

CHECKPOINTING_IS_RENAMED = hasattr(PreTrainedModel, "activation_checkpointing_enable")
"""Whether models and `TrainingArguments` use the name `activation_checkpointing` (5.23)."""

_OLD_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
OLD_ARGUMENTS = {} if CHECKPOINTING_IS_RENAMED else _OLD_NAMES
"""Fields of `TrainingArguments` whose name differs from 5.23: its name in 5.23 → its name in this version."""


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model by either name, None without one."""
    return next((arguments[name] for name in ("cache", "past_key_values") if arguments.get(name) is not None), None)


def takes_cache(forward: Forward) -> Forward:
    """Let a `forward` with a parameter `cache` take it by either name; from 5.24 on, the old one with a warning."""
    if CACHE == "cache":
        return deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)  # type: ignore[return-value]

    @functools.wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if CACHE in kwargs:
            kwargs["cache"] = kwargs.pop(CACHE)
        return forward(self, *args, **kwargs)

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


class _OldPreTrainedModel(PreTrainedModel):
    """The base class of models before 5.23, with 5.23's names for checkpointing."""

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        options = {"every_n_layers": every_n_layers, "offload": offload}
        super().gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def gradient_checkpointing_enable(  # type: ignore[override]
        self, gradient_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Turn on checkpointing by its old name, which calls the method of the new name."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, every_n_layers, offload)

    def activation_checkpointing_disable(self) -> None:
        self.gradient_checkpointing_disable()


NewPreTrainedModel: type[PreTrainedModel] = PreTrainedModel if CHECKPOINTING_IS_RENAMED else _OldPreTrainedModel
"""The base class of models, with methods named `activation_checkpointing_…` (5.23)."""


def enable_checkpointing(model: PreTrainedModel, options: dict[str, Any] | None = None) -> None:
    """Turn on activation checkpointing of any model; see `CHECKPOINTING_IS_RENAMED`."""
    enable = model.activation_checkpointing_enable if CHECKPOINTING_IS_RENAMED else model.gradient_checkpointing_enable
    enable(options)


def disable_checkpointing(model: PreTrainedModel) -> None:
    """Turn off activation checkpointing of any model; see `CHECKPOINTING_IS_RENAMED`."""
    if CHECKPOINTING_IS_RENAMED:
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()


def is_checkpointing(model: PreTrainedModel) -> bool:
    """Return whether activation checkpointing is on; see `CHECKPOINTING_IS_RENAMED`."""
    return model.is_activation_checkpointing if CHECKPOINTING_IS_RENAMED else model.is_gradient_checkpointing


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
    is_sliding = None  # neither True nor False: other layers size the masks

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def reset(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no states to move, to cut or to reorder."""

    offload = prefetch = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset


EMPTY_LAYER: type = cache_utils.DummyLayer if CACHES_KNOW_READERS else NoState
"""The class of cache entries for layers that store nothing; see `CACHES_KNOW_READERS`."""

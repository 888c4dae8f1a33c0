"""Configs by transformers' own classes, whose import takes seconds: where the plain way does not know all."""

import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

import crosslayer.core.decoder  # noqa: F401  registers our model
from crosslayer.core.plan import DepthPlan
from crosslayer.core.transformers_versions import CACHE, layers_without_cache
from crosslayer.models.load import one_line_errors

ENCODERS = frozenset(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)  # masked language models; some can be decoders too
WHOLE = (auto.MODEL_FOR_MULTIMODAL_LM_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING)


def transformers_config(values: dict[str, Any], name: str) -> PreTrainedConfig:
    """Return the config that transformers reads from the fields of a config.json.

    Raises:
        ValueError: the model type is unknown, or its class refuses the fields.

    """
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{name!r}: the model type {model_type!r} is unknown to transformers {transformers.__version__}"
        )
    with one_line_errors(name):
        return CONFIG_MAPPING[model_type].from_dict(values)


def count_parameters(config: Any) -> int | None:
    """Return the parameters of the whole model of a config, or of its fields; None if transformers cannot build it."""
    try:
        with one_line_errors("config"), torch.device("meta"):
            config = transformers_config(config, "config") if isinstance(config, dict) else config
            model_class: Any = next(mapping[type(config)] for mapping in WHOLE if type(config) in mapping)
            return sum(weight.numel() for weight in model_class(config).parameters())
    except ValueError:
        return None


def is_encoder_type(*model_types: str) -> bool:
    """Return whether one of the model types is a masked language model's."""
    return not ENCODERS.isdisjoint(model_types)


def takes_cache(model: Any) -> bool:
    """Return whether a model's forward takes a cache."""
    return CACHE in inspect.signature(type(model).forward).parameters


def check_readers(config: PreTrainedConfig, plan: DepthPlan) -> None:
    """Refuse a plan in which others store nothing than in transformers' cache.

    Raises:
        ValueError: the config shares keys and values in an unknown way.

    """
    reading = {layer for layer, source in enumerate(plan.keys) if source not in (layer, None)}
    reusing = layers_without_cache(config)
    if reusing != reading:
        raise ValueError(
            f"layers {sorted(reusing)} of {config.model_type} reuse a cache, but no known field says whose"
        )

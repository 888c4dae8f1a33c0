"""Configs by transformers' own classes, whose import takes seconds: where the plain way does not know all."""

import ast
import copy
import functools
import inspect
import re
import textwrap
from pathlib import Path
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
DECODERS = frozenset({**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
LATENT_SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def transformers_config(values: dict[str, Any], name: str) -> PreTrainedConfig:
    """Return the config that transformers reads from the fields of a config.json.

    Raises:
        ValueError: the model type is unknown, or its class refuses the fields.

    """
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{name!r}: transformers {transformers.__version__} has no model type {model_type!r}; try a .gguf file of "
            "the model, or --like TYPE with a type of transformers whose fields mean the same, such as llama"
        )
    if values.get("use_mla") is False:  # then the sizes of latents are 0 or null, which classes refuse
        values = {other: value for other, value in values.items() if other not in LATENT_SIZES}
    try:
        with one_line_errors(name):
            return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(values))
    except ValueError:
        for part in (values, *(part for part in values.values() if isinstance(part, dict))):
            types, layers = part.get("layer_types"), part.get("num_hidden_layers")
            if isinstance(types, list) and isinstance(layers, int) and len(types) != layers:
                raise ValueError(
                    f"{name!r}: layer_types must have an entry for each of {layers} layers (num_hidden_layers), got "
                    f"{len(types)}; list the types of the layers that are left"
                ) from None
        raise


@functools.cache
def mentioned(kind: type[PreTrainedConfig]) -> frozenset[str]:
    """Return the attributes and texts in the methods of a config class: the names of fields that it may act on."""
    names = set()
    for base in kind.__mro__[: kind.__mro__.index(PreTrainedConfig)]:
        for part in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if not isinstance(part, ast.FunctionDef):
                continue
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
    return frozenset(names)


def in_model(kind: type[PreTrainedConfig], name: str) -> bool:
    """Return whether the code of a config class's model reads a field."""
    return (
        re.search(rf"(config\.|[\"']){re.escape(name)}\b", _model_code(Path(inspect.getfile(kind)).parent)) is not None
    )


@functools.cache
def _model_code(folder: Path) -> str:
    return "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("modeling_*.py")))


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


def is_decoder_type(*model_types: str) -> bool:
    """Return whether transformers has a decoder of one of the model types."""
    return not DECODERS.isdisjoint(model_types)


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

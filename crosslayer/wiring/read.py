"""Read a model's wiring from its config, without loading or downloading weights.

Steps: name → config → what each layer caches, which layers share, the form of the residual → result.
"""

import inspect
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from crosslayer.core.transformers_versions import CACHE
from crosslayer.models.load import check_layers, is_causal, load_config, public_name, resolve_dtype
from crosslayer.wiring.fields import (
    LayerStates,
    depth_plan,
    field,
    int_field,
    layer_states,
    layer_types_of,
    residual_form,
)
from crosslayer.wiring.result import ModelPlan

ENCODERS = frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES)  # masked language models; some can be decoders too
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def read_plan(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    length: int = 1,
    dtype: str | torch.dtype | None = None,
) -> ModelPlan:
    """Return which layers of a model share states, what its cache holds, and the form of its residual: see `plan`."""
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    config = model.config if isinstance(model, PreTrainedModel) else model
    config = config if isinstance(config, PreTrainedConfig) else load_config(str(config))
    text = config.get_text_config(decoder=True)
    _check(config, text)
    layer_types = layer_types_of(text)
    plan, methods = depth_plan(text, layer_types), field(text, "methods", default=[])
    residual, streams = residual_form(text, methods)
    cache_dtype = resolve_dtype(dtype or text.dtype or config.dtype or torch.bfloat16, torch.device("cpu"))
    assert isinstance(cache_dtype, torch.dtype)
    layers = [
        layer_states(text.per_layer_config[layer], layer_type, layer) for layer, layer_type in enumerate(layer_types)
    ]
    return ModelPlan(
        model=config.model_type if isinstance(model, PreTrainedConfig) else public_name(model),
        type=config.model_type,
        plan=plan,
        layers=tuple(s if plan.attends(i) or not s.keys else LayerStates("no attention") for i, s in enumerate(layers)),
        residual=residual,
        streams=streams,
        methods=tuple(method.name() for method in methods),
        caches=_caches(config, text) and (not isinstance(model, PreTrainedModel) or _takes_cache(model)),
        length=length,
        dtype=str(cache_dtype).removeprefix("torch."),
        item_bytes=cache_dtype.itemsize,
    )


def _caches(config: PreTrainedConfig, text: PreTrainedConfig) -> bool:
    """Return whether a config's model keeps a cache, by its class or its model type."""
    if config.architectures and not is_causal(config):
        return False
    types = {config.model_type, text.model_type}
    if types & ENCODERS and not field(text, "is_decoder", default=False):
        return False
    return field(text, "use_cache", "layer_types") is not None


def _takes_cache(model: PreTrainedModel) -> bool:
    return CACHE in inspect.signature(type(model).forward).parameters


def _check(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Refuse a config that does not describe a stack of Transformer layers, or has impossible values."""
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder; only decoders and encoders are supported")
    layers = field(text, "num_hidden_layers")
    check_layers(layers)
    first = text if layers is None else text.per_layer_config[0]  # layers may differ
    missing = [name for name in NEEDED if field(first, name) is None]
    if missing:
        raise ValueError(
            f"the config of {config.model_type} has no {', '.join(missing)}, so it does not describe a language "
            "model with attention"
        )
    for name in NEEDED:
        int_field(first, 0, name)

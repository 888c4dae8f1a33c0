"""Read a model's wiring from its config, without loading or downloading weights.

Steps: name → config → what each layer caches, which layers share, the form of the residual → result.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from crosslayer.core.transformers_versions import CACHE
from crosslayer.models.load import check_layers, is_causal, load_config, public_name, resolve_dtype
from crosslayer.wiring.fields import NO_KV_CACHE, depth_plan, layer_states, layer_types_of, residual_form
from crosslayer.wiring.result import ModelPlan
from crosslayer.wiring.states import ItemSizes, LayerStates
from crosslayer.wiring.values import field, int_field

ENCODERS = frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES)  # masked language models; some can be decoders too
REFUSED = {  # model types whose states are of another kind
    "blt": "consists of several models",
    "recurrent_gemma": "keeps its states in its modules, not in a cache",
    "reformer": "caches hidden states and hash buckets",
    "rwkv": "has no attention, and keeps states of its own kind",
    "xlnet": "caches hidden states",
    "xlstm": "has no attention, and keeps states of its own kind",
}
NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")


def read_plan(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    length: int | Sequence[int] = 1,
    dtype: str | torch.dtype | None = None,
    batch: int = 1,
) -> ModelPlan:
    """Return which layers of a model share states, what its cache holds, and the form of its residual: see `plan`."""
    lengths = (length,) if isinstance(length, int) else tuple(length)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    config = model.config if isinstance(model, PreTrainedModel) else model
    config = config if isinstance(config, PreTrainedConfig) else load_config(str(config))
    text = config.get_text_config(decoder=True)
    if text.model_type in REFUSED:
        raise ValueError(f"{text.model_type} {REFUSED[text.model_type]}, which is not counted")
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
        lengths=lengths,
        batch=batch,
        dtype=str(cache_dtype).removeprefix("torch."),
        kv_dtype=str(cache_dtype).removeprefix("torch."),
        sizes=ItemSizes(cache_dtype.itemsize, cache_dtype.itemsize),
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
    needed = list(NEEDED)
    if layers is None or not set(layer_types_of(text)) <= set(NO_KV_CACHE):
        needed.insert(1, "num_attention_heads")
    missing = [name for name in needed if field(first, name) is None]
    if missing:
        raise ValueError(
            f"the config of {config.model_type} has no {', '.join(missing)}, so it does not describe a language "
            "model with attention"
        )
    for name in needed:
        int_field(first, 0, name)

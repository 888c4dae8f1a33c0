"""Conversion of Hugging Face models to ours and back: the config is translated, the weights keep their names.

An attribute of the source config must be translated, ignored by name, or at its default; others are refused, since an
unknown attribute could change the model silently.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.families import model_types
from crosslayer.core.decoder.family import is_rope_by_type
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.plan import DepthPlan
from crosslayer.core.transformers_versions import attention_that_caps

SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters", "attention_dropout", "head_dim",
)  # fmt: skip
# attributes without influence on what the model computes, like all that begin with an underscore
IGNORED = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "pretraining_tp", "id2label",
    "label2id", "problem_type", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "is_encoder_decoder", "unk_token_id", "sep_token_id", "cls_token_id", "max_window_layers", "use_sliding_window",
    "cache_implementation", "sliding_window_pattern",  # transformers has made layer_types of it
}  # fmt: skip


def to_config(source: PreTrainedConfig, cross_layer: Any = None) -> CrossLayerConfig:
    """Translate a config to ours and add methods; a config of ours keeps those that it has.

    Raises:
        ValueError: the model type or an attribute cannot be translated, the model has linear attention, or a method
            collides with one that the model has.
    """
    if isinstance(source, CrossLayerConfig):
        if source.linear_layers:
            raise ValueError(
                f"layers {list(source.linear_layers)} have linear attention, which a retrofit cannot share; use a "
                "model whose layers all have softmax attention"
            )
        return CrossLayerConfig(**{**source.to_dict(), "cross_layer": [*source.cross_layer, *(cross_layer or ())]})
    known = model_types()
    if source.model_type not in known:
        raise ValueError(
            f"model type {source.model_type!r} cannot be converted, only {', '.join(known)}; `crosslayer diagnose` "
            "works with others too"
        )
    family, mapping = known[source.model_type]
    values = source.to_dict()
    values["head_dim"] = values.get("head_dim") or source.hidden_size // source.num_attention_heads
    _refuse_unknown(source, values, (*SHARED, *mapping.copied, *mapping.renamed))
    kept = {key: values[key] for key in (*SHARED, *mapping.copied) if key in values}
    kept |= {ours: values[name] for name, ours in mapping.renamed.items()}
    return CrossLayerConfig(**{**kept, **mapping.fixed}, family=family, cross_layer=cross_layer)


def _refuse_unknown(source: PreTrainedConfig, values: Mapping[str, Any], translated: Sequence[str]) -> None:
    """Refuse attributes that are neither translated, nor ignored, nor at their default (None if there is none)."""
    defaults = type(source)().to_dict()
    for key, value in values.items():
        if key in translated or key in IGNORED or key.startswith("_"):
            continue
        as_default = value == defaults[key] if key in defaults else value is None
        if not as_default:
            raise ValueError(
                f"{source.model_type}: config attribute {key} = {value!r} is unknown and may change the model, so it "
                "cannot be converted"
            )


def from_config(config: CrossLayerConfig, family: str) -> PreTrainedConfig:
    """Translate our config to a Hugging Face model type, named by `family`.

    Raises:
        ValueError: the config has methods, or the model type cannot express a value.
    """
    from transformers import AutoConfig

    known = model_types()
    if family not in known:
        raise ValueError(f"model type must be one of {', '.join(known)}, got {family!r}")
    if config.linear_layers:
        raise ValueError(f"{family} cannot express the linear attention of layers {list(config.linear_layers)}")
    if config.plan != DepthPlan.identity(config.num_hidden_layers) or config.methods:
        raise ValueError(f"{family} cannot express {', '.join(method.name() for method in config.methods)}")
    values, (_, mapping) = config.to_dict(), known[family]
    kept = {key: values[key] for key in (*SHARED, *mapping.copied) if key not in mapping.renamed.values()}
    kept |= {name: values[ours] for name, ours in mapping.renamed.items()}
    defaults = AutoConfig.for_model(family).to_dict()
    kept["rope_parameters"] = _rope_for(family, values, is_rope_by_type(defaults["rope_parameters"]))
    if "use_sliding_window" in defaults:
        kept["use_sliding_window"] = config.sliding_window is not None
    elif "layer_types" in mapping.copied and config.sliding_window is None:
        kept["sliding_window"] = values["sliding_window"] = defaults["sliding_window"]  # unused, but needed
    try:
        result = AutoConfig.for_model(family, **kept)
    except StrictDataclassFieldValidationError as error:  # for example no experts, for a model type that needs some
        raise ValueError(f"{family} cannot express this config: {error.__cause__}") from error
    back = to_config(result).to_dict()
    for each in (values, back):
        if each["attention_output_bias"] is None:
            each["attention_output_bias"] = each["attention_bias"]
    differing = set().union(*[{*mapping.copied, *mapping.fixed} for _, mapping in known.values()])
    for key in ("family", *sorted(differing)):  # attributes that not every model type can express
        if values[key] != back[key]:
            raise ValueError(f"{family} cannot express {key} = {values[key]!r}")
    return result


def _rope_for(family: str, values: Mapping[str, Any], by_type: bool) -> dict[str, Any]:
    """Return the `rope_parameters` of our config's `values` for a model type that has them by layer type, or for all.

    Raises:
        ValueError: the model type has one set of parameters for all layers, which differ in theirs.
    """
    rope, layer_types = values["rope_parameters"], dict.fromkeys(values["layer_types"])
    if is_rope_by_type(rope) == by_type:
        return rope
    if by_type:
        return {layer_type: dict(rope) for layer_type in layer_types}
    first, *others = (rope[layer_type] for layer_type in layer_types)
    if any(other != first for other in others):
        raise ValueError(f"{family} cannot express rope_parameters by layer type, {rope}")
    return first


@torch.no_grad()
def to_model(source: PreTrainedModel) -> CrossLayerForCausalLM:
    """Return our decoder with a copy of the source's weights: the same logits, no methods."""
    return _copied(CrossLayerForCausalLM, to_config(source.config), source)


@torch.no_grad()
def from_model(model: CrossLayerForCausalLM, family: str) -> PreTrainedModel:
    """Return a Hugging Face model of type `family` with a copy of our weights."""
    return _copied(AutoModelForCausalLM, from_config(model.config, family), model)


def _copied(cls: Any, config: PreTrainedConfig, source: PreTrainedModel) -> Any:
    implementation = attention_that_caps(config, source.config._attn_implementation)
    config._experts_implementation = source.config._experts_implementation
    if cls is AutoModelForCausalLM:
        target = cls.from_config(config, dtype=source.dtype, attn_implementation=implementation)
    else:
        target = cls._from_config(config, dtype=source.dtype, attn_implementation=implementation)
    target.load_state_dict(source.state_dict(), strict=True)
    target.generation_config = source.generation_config
    return target.to(source.device).train(source.training)

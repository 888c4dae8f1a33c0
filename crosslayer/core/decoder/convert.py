"""Conversion of Hugging Face models to ours and back, and of pretrained models by methods, without fitting anything.

The config is translated. An attribute of the source config must be translated, ignored by name, or at its default;
others are refused, since an unknown attribute could change the model silently.

Weights keep their names. Those that methods keep, leave out, change or add are listed. Kept weights are the source
model's own tensors, which the caller copies if needed.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.families import is_rope_by_type, model_types, rotary
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Method, Mixing, Wiring
from crosslayer.core.methods import mixes, to_entry
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
            layers = list(source.linear_layers)
            raise ValueError(f"layers {layers} have linear attention, which a retrofit cannot share")
        return CrossLayerConfig(**(source.to_dict() | {"cross_layer": [*source.cross_layer, *(cross_layer or ())]}))
    known = model_types()
    if source.model_type not in known:
        raise ValueError(
            f"model type {source.model_type!r} cannot be converted, only {', '.join(known)}; `crosslayer diagnose` "
            "works with others too"
        )
    family, mapping = known[source.model_type]
    values = source.to_dict()
    values["head_dim"] = values.get("head_dim") or source.hidden_size // source.num_attention_heads

    # attributes that are not translated or ignored must be at their default, or None if they have none
    defaults = type(source)().to_dict()
    for key, value in values.items():
        if key in (*SHARED, *mapping.copied, *mapping.renamed, *IGNORED) or key.startswith("_"):
            continue
        if value != defaults[key] if key in defaults else value is not None:
            what = f"{source.model_type}: config attribute {key} = {value!r}"
            raise ValueError(f"{what} is unknown and may change the model, so it cannot be converted")
    translated = {key: values[key] for key in (*SHARED, *mapping.copied) if key in values}
    translated |= {ours: values[name] for name, ours in mapping.renamed.items()}
    return CrossLayerConfig(**{**translated, **mapping.fixed}, family=family, cross_layer=cross_layer)


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
    values = config.to_dict()
    mapping = known[family][1]
    translated = {key: values[key] for key in (*SHARED, *mapping.copied) if key not in mapping.renamed.values()}
    translated |= {name: values[ours] for name, ours in mapping.renamed.items()}
    defaults = AutoConfig.for_model(family).to_dict()
    translated["rope_parameters"] = _rope_for(family, values, is_rope_by_type(defaults["rope_parameters"]))
    if "use_sliding_window" in defaults:
        translated["use_sliding_window"] = config.sliding_window is not None
    elif "layer_types" in mapping.copied and config.sliding_window is None:
        # no layer slides, but the model type needs a number
        translated["sliding_window"] = values["sliding_window"] = defaults["sliding_window"]
    try:
        result = AutoConfig.for_model(family, **translated)
    except StrictDataclassFieldValidationError as error:  # for example no experts, for a model type that needs some
        raise ValueError(f"{family} cannot express this config: {error.__cause__}") from error

    # a value that the model type cannot express is not the same after the way back
    back = to_config(result).to_dict()
    for each in (values, back):
        if each["attention_output_bias"] is None:
            each["attention_output_bias"] = each["attention_bias"]
    differing = set().union(*[{*mapping.copied, *mapping.fixed} for _, mapping in known.values()])
    for key in ("family", *sorted(differing)):
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
    return _copied(to_config(source.config), source)


@torch.no_grad()
def from_model(model: CrossLayerForCausalLM, family: str) -> PreTrainedModel:
    """Return a Hugging Face model of type `family` with a copy of our weights."""
    return _copied(from_config(model.config, family), model)


def _copied(config: PreTrainedConfig, source: PreTrainedModel) -> Any:
    implementation = attention_that_caps(config, source.config._attn_implementation)
    config._experts_implementation = source.config._experts_implementation
    target = AutoModelForCausalLM.from_config(config, dtype=source.dtype, attn_implementation=implementation)
    target.load_state_dict(source.state_dict(), strict=True)
    target.generation_config = source.generation_config
    return target.to(source.device).train(source.training)


class Weights(NamedTuple):
    """What became of the source's weights, by name; all others are kept."""

    dropped: list[str]
    changed: list[str]
    new: list[str]


class Conversion(NamedTuple):
    """A converted model, and what became of the source's weights."""

    model: PreTrainedModel
    weights: Weights


@torch.no_grad()
def convert_weights(source: PreTrainedModel, methods: list[Method]) -> Conversion:
    """Convert a model of a supported family (decoder/families); the source model is not changed.

    If whole layers are dropped and nothing else changes, the result is of the source's own class.
    """
    # extremes are found 10 times faster than a mask of every weight
    extremes = {name: weight.aminmax() for name, weight in source.named_parameters() if weight.numel()}
    broken = [name for name, ends in extremes.items() if not all(end.isfinite() for end in ends)]
    if broken:
        raise ValueError(f"weights must be finite, got {len(broken)} with NaN or infinity, such as {broken[0]}")
    config = to_config(source.config, [to_entry(method) for method in methods])
    shorter = _without_layers(source, config.wiring)
    if shorter is not None:
        return shorter
    weights = dict(source.state_dict())
    changed = [name for method in config.wiring.methods for name in method.inherit(weights, config, config.wiring)]

    config._experts_implementation = source.config._experts_implementation
    attention = source.config._attn_implementation
    with torch.device("meta"):  # without memory: the source's own tensors follow
        model: Any = CrossLayerForCausalLM._from_config(config, dtype=source.dtype, attn_implementation=attention)
    # rotary tables are in no checkpoint: on the meta device they would stay without numbers
    tables = rotary(config)
    model.model.rotary_emb = None if tables is None else tables.to(source.device)
    names = set(model.state_dict())
    model.load_state_dict({name: weights[name] for name in names if name in weights}, strict=False, assign=True)
    model.tie_weights()
    # a method's modules begin with their own values, but for what a method inherited
    for module in _mixing_modules(model):
        inherited = {name: weight for name, weight in module.state_dict().items() if not weight.is_meta}
        module.to_empty(device=source.device).to(source.dtype)
        module.apply(model._init_weights)
        module.load_state_dict(inherited, strict=False, assign=True)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{type(source).__name__} has no weight {missing[0]}; unload adapters before a retrofit")
    model.generation_config = copy.deepcopy(source.generation_config)
    removed, new = sorted(set(weights) - names), sorted(names - set(weights))
    return Conversion(model.eval(), Weights(removed, [name for name in changed if name in names], new))


def plain_decoder(source: PreTrainedModel) -> CrossLayerForCausalLM:
    """Return a pretrained model as a crosslayer decoder without methods, sharing its tensors."""
    model = convert_weights(source, []).model
    assert isinstance(model, CrossLayerForCausalLM)
    return model


def _mixing_modules(module: nn.Module) -> Iterator[Mixing]:
    """Yield the outermost modules that methods added."""
    for child in module.children():
        if isinstance(child, Mixing):
            yield child
        else:
            yield from _mixing_modules(child)


def _without_layers(source: PreTrainedModel, wiring: Wiring) -> Conversion | None:
    """Return a model of the source's own class, sharing its tensors, if whole layers are dropped and nothing else."""
    plan = wiring.plan
    dropped = [
        layer
        for layer in range(plan.layers)
        if not plan.attends(layer) and plan.mlps[layer] is None and wiring.compensation[layer] is None
    ]
    sources = tuple(None if layer in dropped else layer for layer in range(plan.layers))
    nothing_else = plan == DepthPlan(sources, sources, sources, sources)
    if not dropped or not nothing_else or any(mixes(method) for method in wiring.methods):
        return None

    layers = [layer for layer in range(plan.layers) if layer not in dropped]
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = len(layers)
    if "layer_types" in config.to_dict() and config.layer_types is not None:
        config.layer_types = [config.layer_types[layer] for layer in layers]
    with torch.device("meta"):
        model: Any = type(source)._from_config(
            config, dtype=source.dtype, attn_implementation=source.config._attn_implementation
        )
    # tables and scales that are in no checkpoint: rotary positions (learned ones are weights), Gemma's embeddings
    if source.model.rotary_emb is not None:
        model.model.rotary_emb = type(source.model.rotary_emb)(config=config).to(source.device)
    for name, table in source.model.embed_tokens.named_buffers():
        setattr(model.model.embed_tokens, name, table)

    new_index = {str(layer): str(index) for index, layer in enumerate(layers)}
    weights, removed = {}, []
    for name, weight in source.state_dict().items():
        parts = name.split(".")  # model.layers.N.…
        if parts[:2] != ["model", "layers"]:
            weights[name] = weight
        elif parts[2] in new_index:
            weights[".".join([*parts[:2], new_index[parts[2]], *parts[3:]])] = weight
        else:
            removed.append(name)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = copy.deepcopy(source.generation_config)
    return Conversion(model.eval(), Weights(sorted(removed), [], []))

"""Convert a pretrained model by methods, without fitting anything.

Weights are kept, dropped, changed or new, and all are listed. Kept weights are the source model's own tensors,
which the caller copies if needed.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.family import rotary
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.decoder.weights import to_config
from crosslayer.core.method import Method, Mixing, Wiring
from crosslayer.core.methods import mixes, to_entry
from crosslayer.core.plan import DepthPlan


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
    extremes = {name: weight.aminmax() for name, weight in source.named_parameters() if weight.numel()}
    broken = [name for name, ends in extremes.items() if not all(end.isfinite() for end in ends)]  # 10 times faster
    if broken:
        raise ValueError(f"weights must be finite, got NaN or infinity in {len(broken)}, first in {broken[0]}")
    config = to_config(source.config, [to_entry(method) for method in methods])
    dropped = _dropped_layers(config.wiring)
    if dropped:
        return _drop_layers(source, dropped)
    weights = dict(source.state_dict())
    changed = [name for method in config.wiring.methods for name in method.inherit(weights, config, config.wiring)]
    model = _build(source, config, weights)
    names = set(model.state_dict())
    kept = [name for name in changed if name in names]
    removed, new = sorted(set(weights) - names), sorted(names - set(weights))
    return Conversion(model, Weights(removed, kept, new))


def plain_decoder(source: PreTrainedModel) -> CrossLayerForCausalLM:
    """Return a pretrained model as a crosslayer decoder without methods, sharing its tensors."""
    model = convert_weights(source, []).model
    assert isinstance(model, CrossLayerForCausalLM)
    return model


def _build(source: PreTrainedModel, config: CrossLayerConfig, weights: dict[str, Tensor]) -> CrossLayerForCausalLM:
    """Return a crosslayer model with these weights; modules of methods get their initial values."""
    config._experts_implementation = source.config._experts_implementation
    model: Any = _empty(CrossLayerForCausalLM, config, source)
    tables = rotary(config)  # not in any checkpoint
    model.model.rotary_emb = None if tables is None else tables.to(source.device)
    names = set(model.state_dict())
    model.load_state_dict({name: weights[name] for name in names if name in weights}, strict=False, assign=True)
    model.tie_weights()
    for module in _mixing_modules(model):
        inherited = {name: weight for name, weight in module.state_dict().items() if not weight.is_meta}
        module.to_empty(device=source.device).to(source.dtype)
        module.apply(model._init_weights)
        module.load_state_dict(inherited, strict=False, assign=True)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{type(source).__name__} has no weight {missing[0]}; unload adapters before a retrofit")
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def _empty(model_class: type[PreTrainedModel], config: Any, source: PreTrainedModel) -> PreTrainedModel:
    """Build a model on the meta device, without memory."""
    attention = source.config._attn_implementation
    with torch.device("meta"):
        return model_class._from_config(config, dtype=source.dtype, attn_implementation=attention)


def _mixing_modules(module: nn.Module) -> Iterator[Mixing]:
    """Yield the outermost modules that methods added."""
    for child in module.children():
        if isinstance(child, Mixing):
            yield child
        else:
            yield from _mixing_modules(child)


def _dropped_layers(wiring: Wiring) -> list[int]:
    """Return the layers without attention, MLP and W_c if nothing else changes; otherwise none."""
    plan = wiring.plan
    dropped = [
        layer
        for layer in range(plan.layers)
        if not plan.attends(layer) and plan.mlps[layer] is None and wiring.compensation[layer] is None
    ]
    sources = tuple(None if layer in dropped else layer for layer in range(plan.layers))
    nothing_else = plan == DepthPlan(sources, sources, sources, sources)
    return dropped if nothing_else and not any(mixes(method) for method in wiring.methods) else []


def _drop_layers(source: PreTrainedModel, layers: list[int]) -> Conversion:
    """Return a model of the source's own class without some layers, sharing its tensors."""
    kept = [layer for layer in range(source.config.num_hidden_layers) if layer not in layers]
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = len(kept)
    if "layer_types" in config.to_dict() and config.layer_types is not None:
        config.layer_types = [config.layer_types[layer] for layer in kept]
    model: Any = _empty(type(source), config, source)
    if source.model.rotary_emb is not None:  # learned positions are weights
        model.model.rotary_emb = type(source.model.rotary_emb)(config=config).to(source.device)
    for name, table in source.model.embed_tokens.named_buffers():  # Gemma's scale, not in any checkpoint
        setattr(model.model.embed_tokens, name, table)
    index = {str(old): str(new) for new, old in enumerate(kept)}
    weights, dropped = {}, []
    for name, weight in source.state_dict().items():
        parts = name.split(".")  # model.layers.N.…
        if parts[:2] != ["model", "layers"]:
            weights[name] = weight
        elif parts[2] in index:
            weights[".".join([*parts[:2], index[parts[2]], *parts[3:]])] = weight
        else:
            dropped.append(name)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = copy.deepcopy(source.generation_config)
    return Conversion(model.eval(), Weights(sorted(dropped), [], []))

"""A pretrained model with another wiring: weights are kept, dropped, merged or new, and each is listed.

What stays is the very tensor of the source; a copy is the caller's business.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.family import rotary
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.decoder.weights import to_config
from crosslayer.core.method import Method, Mixing
from crosslayer.core.methods import to_entry
from crosslayer.verbs.retrofit.shorten import layers_gone, without_layers


@dataclass(frozen=True)
class Conversion:
    """The rewired model, and what became of the source's weights (names)."""

    model: PreTrainedModel
    dropped: list[str]
    merged: list[str]
    new: list[str]


@torch.no_grad()
def convert(source: PreTrainedModel, methods: list[Method], merge: str = "first") -> Conversion:
    """Rewire a model of a family that converts (decoder/families).

    Where whole layers go and nothing else changes, the model is of the source's own class.

    Args:
        source: the pretrained model, which is left as it is.
        methods: the wiring.
        merge: what becomes of pretrained weights that a group shares, a rule of a method's `merges`.

    Raises:
        ValueError: the family or the wiring is not possible, a weight is not finite, or the merge does not apply.

    """
    broken = [name for name, weight in source.named_parameters() if not _is_finite(weight)]
    if broken:
        raise ValueError(f"{len(broken)} weights hold NaN or infinity, the first is {broken[0]}; they must be finite")
    config = to_config(source.config, [to_entry(method) for method in methods])
    gone = layers_gone(config.wiring)
    if gone and merge == "first":
        model, lost = without_layers(source, gone)
        return Conversion(model, dropped=sorted(lost), merged=[], new=[])
    weights = dict(source.state_dict())
    merged = _inherit(weights, config, merge)
    model = _rewired(source, config, weights)
    names = set(model.state_dict())
    return Conversion(
        model,
        dropped=sorted(set(weights) - names),
        merged=[name for name in merged if name in names],
        new=sorted(names - set(weights)),
    )


def _is_finite(weight: Tensor) -> bool:
    """Return whether a weight holds neither NaN nor infinity; its extremes tell in a tenth of the time."""
    if not weight.numel():
        return True
    least, largest = weight.aminmax()
    return bool(least.isfinite() & largest.isfinite())


def _inherit(weights: dict[str, Tensor], config: CrossLayerConfig, merge: str) -> list[str]:
    """Let every method that knows the rule change the weights; return the names of those that changed."""
    knowing = [method for method in config.wiring.methods if merge in method.merges]
    if merge != "first" and not knowing:
        rules = sorted({rule for method in config.wiring.methods for rule in method.merges})
        raise ValueError(f"merge {merge!r} is not known to these methods; use {' or '.join(rules) or 'first'}")
    merged = []
    for method in knowing:
        merged += method.inherit(weights, config, config.wiring, merge)
    if merge != "first" and not merged:
        raise ValueError(f"merge {merge!r} merges what groups of layers share, and there are none; use first")
    return merged


def _rewired(source: PreTrainedModel, config: CrossLayerConfig, weights: dict[str, Tensor]) -> CrossLayerForCausalLM:
    """Return our model with these weights; modules of methods begin with their first values."""
    model = _empty(config, source)
    names = set(model.state_dict())
    model.load_state_dict({name: weights[name] for name in names if name in weights}, strict=False, assign=True)
    model.tie_weights()
    for module in _of_methods(model):
        _begin(model, module, source)
    lost = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lost:
        raise ValueError(f"{type(source).__name__} has no weight {lost[0]}; unload adapters before a retrofit")
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def _of_methods(module: nn.Module) -> Iterator[Mixing]:
    """Yield the modules that methods brought along, without those inside of them."""
    for child in module.children():
        if isinstance(child, Mixing):
            yield child
        else:
            yield from _of_methods(child)


def _begin(model: CrossLayerForCausalLM, module: Mixing, source: PreTrainedModel) -> None:
    """Give a method's module, with all inside of it, memory and first values; weights that it inherited stay."""
    inherited = {name: weight for name, weight in module.state_dict().items() if not weight.is_meta}
    module.to_empty(device=source.device).to(source.dtype)
    module.apply(model._init_weights)
    module.load_state_dict(inherited, strict=False, assign=True)


def _empty(config: CrossLayerConfig, source: PreTrainedModel) -> CrossLayerForCausalLM:
    """Build the model without memory; only the rotary tables, which no checkpoint holds, are real."""
    config._experts_implementation = source.config._experts_implementation
    with torch.device("meta"):
        model: Any = CrossLayerForCausalLM._from_config(
            config, dtype=source.dtype, attn_implementation=source.config._attn_implementation
        )
    tables = rotary(config)
    model.model.rotary_emb = None if tables is None else tables.to(source.device)
    return model

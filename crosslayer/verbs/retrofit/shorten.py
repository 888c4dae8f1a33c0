"""A model of the source's own class with fewer layers: what is left where a wiring only takes whole layers away."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.core.method import Wiring, mixes
from crosslayer.core.plan import DepthPlan


def layers_gone(wiring: Wiring) -> list[int]:
    """Return the layers without attention, MLP and W_c, if that is all that a wiring changes; otherwise nothing."""
    plan = wiring.plan
    gone = [
        layer
        for layer in range(plan.layers)
        if not plan.attends(layer) and plan.mlps[layer] is None and wiring.compensation[layer] is None
    ]
    sources = tuple(None if layer in gone else layer for layer in range(plan.layers))
    nothing_else = plan == DepthPlan(sources, sources, sources, sources)
    nothing_else &= not any(mixes(method) for method in wiring.methods)
    return gone if nothing_else else []


def without_layers(source: PreTrainedModel, gone: list[int]) -> tuple[PreTrainedModel, list[str]]:
    """Return a model of the source's own class without some layers, and the names of the weights that went with them.

    What stays is the very tensor of the source.
    """
    kept = [layer for layer in range(source.config.num_hidden_layers) if layer not in gone]
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = len(kept)
    if "layer_types" in config.to_dict() and config.layer_types is not None:
        config.layer_types = [config.layer_types[layer] for layer in kept]
    with torch.device("meta"):
        model: Any = type(source)._from_config(
            config, dtype=source.dtype, attn_implementation=source.config._attn_implementation
        )
    if source.model.rotary_emb is not None:  # positions that are learned are weights
        model.model.rotary_emb = type(source.model.rotary_emb)(config=config).to(source.device)
    for name, table in source.model.embed_tokens.named_buffers():  # Gemma's scale, which no checkpoint holds
        setattr(model.model.embed_tokens, name, table)
    weights, lost = _renumbered(source.state_dict(), kept)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval(), lost


def _renumbered(weights: dict[str, Tensor], kept: list[int]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights of the layers that stay, numbered anew, and the names of all others."""
    place = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(kept)}
    renumbered, lost = {}, []
    for name, weight in weights.items():
        prefix = ".".join(name.split(".")[:3]) + "."  # of a layer: model.layers.N.
        if not name.startswith("model.layers."):
            renumbered[name] = weight
        elif prefix in place:
            renumbered[name.replace(prefix, place[prefix], 1)] = weight
        else:
            lost.append(name)
    return renumbered, lost

"""What a wiring leaves of each layer, where it only takes sublayers away: all that other programs have a form for.

Layers of which nothing is left are not written at all, and those behind them move up.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.method import mixes
from crosslayer.core.plan import STATES
from crosslayer.output.formatting import ranges
from crosslayer.verbs.retrofit.words import title

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Left:
    """What is left of layer `number` of the model: attention, W_c alone in its place, or None; and its MLP or not."""

    number: int
    attention: Literal["own", "compensation"] | None
    mlp: bool

    @property
    def whole(self) -> bool:
        """Whether nothing of it is gone."""
        return self.attention == "own" and self.mlp


def left(config: CrossLayerConfig) -> list[Left]:
    """Return the layers of which something is left, in order; for a config that `strange` says nothing of."""
    plan, targets = config.plan, config.wiring.compensation
    layers = []
    for number in range(plan.layers):
        gone = None if targets[number] is None else "compensation"
        layers.append(Left(number, "own" if plan.attends(number) else gone, plan.mlps[number] is not None))
    return [layer for layer in layers if layer.attention is not None or layer.mlp]


def strange(config: CrossLayerConfig) -> str | None:
    """Return what a model has that no other program knows, in words that name method and layer; None for nothing."""
    for method in config.methods:
        if mixes(method):
            return f"{title([method])} mixes states or streams by modules of its own"
    if config.linear_layers:
        return f"layers {ranges(config.linear_layers)} have Kimi Linear's attention"
    plan = config.plan
    for layer in range(plan.layers):
        for state in STATES:
            if plan.reads(state, layer) not in ((), (layer,)):
                lent = plan.source_label(state, layer).removeprefix("← ")
                return f"layer {layer} reads the {state} of layer {lent} ({culprits(config, [layer])})"
        target = config.wiring.compensation[layer]
        if target not in (None, "attention") or target is not None and plan.attends(layer):
            return f"W_c of layer {layer} does not stand in the place of attention ({culprits(config, [layer])})"
    return None


def unlike_llama(config: CrossLayerConfig) -> str | None:
    """Return in what the layers of a model differ from Llama's, beyond biases; None for nothing."""
    kinds = set(config.layer_types or ())
    facts = {
        f"family is {config.family!r}": "export" not in config.components.supports,
        "queries and keys are normed (qk_norm)": config.qk_norm,
        f"it has {config.num_local_experts} experts": config.num_local_experts is not None,
        f"layers see a window of {config.sliding_window} tokens": "sliding_attention" in kinds,
        "attention is scaled by query_pre_attn_scalar": config.query_pre_attn_scalar is not None,
        "scores are capped (attn_logit_softcapping)": config.attn_logit_softcapping is not None,
        "logits are capped (final_logit_softcapping)": config.final_logit_softcapping is not None,
        f"hidden_act is {config.hidden_act!r}": config.hidden_act != "silu",
    }
    return next((fact for fact, so in facts.items() if so), None)


def rope(config: CrossLayerConfig) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, whose type in transformers lets all of them be missing."""
    assert config.rope_parameters is not None
    return dict(config.rope_parameters)


def culprits(config: CrossLayerConfig, layers: Iterable[int]) -> str:
    """Return the methods that change any of some layers, with their options."""
    count, named = config.num_hidden_layers, set(layers)
    changed = []
    for method in config.methods:
        plan = method.plan(count)
        vectors = [plan.sources(state) for state in (*STATES, "mlps")]
        if any(vector[layer] != layer for vector in vectors for layer in named):
            changed.append(method)
    return title(changed)


def renumbered(weights: Mapping[str, Tensor], layers: list[Left]) -> dict[str, Tensor]:
    """Return the weights of the layers that are left, numbered from 0, and all that belong to no layer."""
    places = {layer.number: place for place, layer in enumerate(layers)}
    result = {}
    for name, weight in weights.items():
        match = LAYER.fullmatch(name)
        if match is None:
            result[name] = weight
        elif int(match[1]) in places:
            result[f"model.layers.{places[int(match[1])]}.{match[2]}"] = weight
    return result

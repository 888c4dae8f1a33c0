"""What remains of each layer of a model that only drops sublayers, the only change that other programs support.

Layers with nothing remaining are not written, and the layers after them move up.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.families import is_rope_by_type
from crosslayer.core.methods import mixes
from crosslayer.core.plan import STATES
from crosslayer.output.formatting import ranges
from crosslayer.verbs.retrofit.page import title

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class RemainingLayer:
    """What remains of layer `number`: attention, its linear compensation (W_c) or None; and whether it has an MLP."""

    number: int
    attention: Literal["own", "compensation"] | None
    mlp: bool

    @property
    def whole(self) -> bool:
        """Whether no sublayer is dropped."""
        return self.attention == "own" and self.mlp


def remaining_layers(config: CrossLayerConfig) -> list[RemainingLayer]:
    """Return the layers with a remaining sublayer, in order; for a config with no `unsupported` feature."""
    plan, targets = config.plan, config.wiring.compensation
    layers = []
    for index in range(plan.layers):
        replacement = None if targets[index] is None else "compensation"
        attention = "own" if plan.attends(index) else replacement
        layers.append(RemainingLayer(index, attention, plan.mlps[index] is not None))
    # A layer without either adds nothing to the residual stream, so a model without it has the same logits.
    return [layer for layer in layers if layer.attention is not None or layer.mlp]


def unsupported(config: CrossLayerConfig) -> str | None:
    """Return the feature of a model that no other program has, with method and layer; None if there is none."""
    for method in config.methods:
        if mixes(method):
            return f"{title([method])} mixes states or residual streams with modules of its own"
    if config.linear_layers:
        return f"layers {ranges(config.linear_layers)} have Kimi Linear's attention"
    plan = config.plan
    if plan.beyond_sharing:
        return plan.beyond_sharing
    for layer in range(plan.layers):
        for state in STATES:
            if plan.reads(state, layer) not in ((), (layer,)):
                source = plan.source_label(state, layer).removeprefix("← ")
                return f"layer {layer} reads the {state} of layer {source} ({culprits(config, [layer])})"
        # llama.cpp applies W_c to the normalized input in place of attention, and nowhere else.
        target = config.wiring.compensation[layer]
        if target not in (None, "attention") or target is not None and plan.attends(layer):
            return (
                f"the linear compensation (W_c) of layer {layer} does not replace attention "
                f"({culprits(config, [layer])})"
            )
    return None


def unlike_llama(config: CrossLayerConfig) -> str | None:
    """Return how the layers of a model differ from Llama's, apart from biases; None if they do not."""
    kinds = set(config.layer_types or ())
    facts = {
        f"family is {config.family!r}": "export" not in config.components.supports,
        "queries and keys are normalized (qk_norm)": config.qk_norm,
        f"it has {config.num_local_experts} experts": config.num_local_experts is not None,
        "rope_parameters differ by layer type": is_rope_by_type(config.rope_parameters),
        f"layers see a window of {config.sliding_window} tokens": "sliding_attention" in kinds,
        "attention is scaled by query_pre_attn_scalar": config.query_pre_attn_scalar is not None,
        "scores are capped (attn_logit_softcapping)": config.attn_logit_softcapping is not None,
        "logits are capped (final_logit_softcapping)": config.final_logit_softcapping is not None,
        f"hidden_act is {config.hidden_act!r}": config.hidden_act != "silu",
    }
    return next((fact for fact, holds in facts.items() if holds), None)


def rope(config: CrossLayerConfig) -> dict[str, Any]:
    """Return the parameters of the rotary embedding."""
    # transformers declares them and each of their keys as optional; a crosslayer config has all that its type needs.
    assert config.rope_parameters is not None
    return dict(config.rope_parameters)


def culprits(config: CrossLayerConfig, layers: Iterable[int]) -> str:
    """Return the methods that change any of the given layers, with their options."""
    named = set(layers)
    changed = []
    for method in config.methods:
        plan = method.plan(config.num_hidden_layers)
        sources = [plan.sources(state) for state in (*STATES, "mlps")]
        if any(by_layer[layer] != layer for by_layer in sources for layer in named):
            changed.append(method)
    return title(changed)


def renumbered(weights: Mapping[str, Tensor], layers: list[RemainingLayer]) -> dict[str, Tensor]:
    """Return the weights of the remaining layers, renumbered from 0, and all weights outside layers."""
    new = {layer.number: index for index, layer in enumerate(layers)}
    result = {}
    for name, weight in weights.items():
        match = LAYER.fullmatch(name)
        if match is None:
            result[name] = weight
        elif int(match[1]) in new:
            result[f"model.layers.{new[int(match[1])]}.{match[2]}"] = weight
    return result

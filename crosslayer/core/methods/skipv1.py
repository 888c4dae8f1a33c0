"""SkipV1Former: from the second layer on, half of the value heads are those of the first layer.

    V_i = [V_1 of head 1, own, V_1 of head 3, own, …],  i ≥ 2

The order of the heads is arbitrary; alternating ones keep a head of each origin together when heads are split over
ranks.

Flows: values of the first layer, as cached. Reads: every other layer. Cache: keys of all layers, all values of the
first layer and half of the values of the others: (1 + (L − 1)/2) / L of the values.
Source: SkipV1Former (arXiv 2510.16807).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crosslayer.core.method import Combined, Config, Method, PerSource, StateReader, Wiring
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class SkipV1(Method):
    """Every layer but the first computes only half of its value heads."""

    def plan(self, layers: int) -> DepthPlan:
        """Let each layer compute half of its value heads and read the others of the first layer."""
        if layers < 2:
            raise ValueError(f"skipv1 needs at least 2 layers, got {layers}")
        own = tuple(range(layers))
        values = (0, *((0, layer) for layer in own[1:]))
        return DepthPlan(own, own, values, own, value_shares=(1.0, *(0.5,) * (layers - 1)))

    def inherit(self, weights: dict[str, Tensor], config: Config, wiring: Wiring) -> list[str]:
        """Keep the rows of the value heads that a layer computes itself."""
        changed = []
        for layer in range(1, config.num_hidden_layers):
            prefix = f"model.layers.{layer}.self_attn.v_proj."
            for name in (prefix + "weight", prefix + "bias"):
                if name in weights and wiring.plan.has_own("values", layer):
                    heads = weights[name].unflatten(0, (config.num_key_value_heads, -1))  # (H_kv, D, C) or (H_kv, D)
                    weights[name] = heads[1::2].flatten(0, 1).contiguous()
                    changed.append(name)
        return changed

    def reader(self, config: Config, wiring: Wiring, layer: int) -> StateReader | None:
        """Return the module that interleaves the first layer's heads with the layer's own."""
        assert config.num_key_value_heads is not None
        if config.num_key_value_heads % 2:
            raise ValueError(f"skipv1: num_key_value_heads must be even, got {config.num_key_value_heads}")
        return None if layer == 0 else _Interleave()


class _Interleave(StateReader):
    """Takes every second head from the first layer, the others from the layer itself."""

    def forward(self, keys: PerSource, values: PerSource, mask: Tensor | None, new: int) -> Combined:
        """Return the keys unchanged, the values (B, H_kv, S, D) of both layers, and the mask unchanged."""
        first, own = values  # (B, H_kv, S, D), (B, H_kv / 2, S, D)
        return keys[0], torch.stack([first[:, ::2], own], dim=2).flatten(1, 2), mask

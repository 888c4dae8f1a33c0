"""FusedKV: upper layers read keys and values fused of two layers of the lower half, and store nothing.

    K_i = w_{i,1} ∘ K_1 + w_{i,n} ∘ K_n,  V_i = u_{i,1} ∘ V_1 + u_{i,n} ∘ V_n,  i > n = L/2
    K_i = K_n,  V_i = V_1  (lite)

The weights are trained, a number for each head and channel; the two channels that the rotary embedding turns together
share that of the keys, so that fusing keys after the rotation is fusing them before. They begin at the lite form.

Flows: keys and values of the first layer and of the last of the lower half, as cached. Reads: every layer above.
Cache: the lower half. Source: FusedKV (arXiv 2512.03870).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.core.method import Combined, Config, Method, PerSource, StateReader, Wiring
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class FusedKV(Method):
    """Upper layers read what two lower layers have cached."""

    lite: bool = False
    """Take keys from the last layer of the lower half and values from the first layer, without weights."""
    start: int | None = None
    """0-based first layer that reads instead of storing; None is the middle."""

    def plan(self, layers: int) -> DepthPlan:
        """Let the upper layers read the first layer and the last of the lower half."""
        start = layers // 2 if self.start is None else self.start
        if not 2 <= start < layers:
            raise ValueError(
                f"fusedkv: start is {start} of {layers} layers; it must leave two layers below it and one above"
            )
        last, own = start - 1, tuple(range(layers))
        keys = last if self.lite else (0, last)
        values = 0 if self.lite else (0, last)
        above = layers - start
        return DepthPlan(own, own[:start] + (keys,) * above, own[:start] + (values,) * above, own)

    def reader(self, config: Config, wiring: Wiring, layer: int) -> StateReader | None:
        """Fuse in every layer above, unless a plan alone says it."""
        assert config.head_dim is not None
        if config.head_dim % 2:
            raise ValueError(f"fusedkv: head_dim is {config.head_dim}; it must be even, as rotary pairs share a weight")
        return None if self.plan(config.num_hidden_layers).keys[layer] == layer else _Fusion(config)


class _Fusion(StateReader):
    """Sums the states of two layers with a weight for each head and channel."""

    split_by_head = {"key_weights": 0, "value_weights": 0}

    def __init__(self, config: Config):
        super().__init__()
        assert config.num_key_value_heads is not None and config.head_dim is not None
        heads, size = config.num_key_value_heads, config.head_dim
        self.key_weights = nn.Parameter(torch.zeros(heads, 2, size // 2))  # (H_kv, 2, D / 2)
        self.value_weights = nn.Parameter(torch.zeros(heads, 2, size))  # (H_kv, 2, D)

    def reset(self) -> None:
        """Begin with the keys of the last layer of the lower half and the values of the first layer."""
        init.copy_(self.key_weights, _chosen(self.key_weights, 1))
        init.copy_(self.value_weights, _chosen(self.value_weights, 0))

    def forward(self, keys: PerSource, values: PerSource, mask: Tensor | None, new: int) -> Combined:
        """Return keys and values (B, H_kv, S, D) fused, and the mask as it is."""
        key_weights = self.key_weights.repeat(1, 1, 2)  # (H_kv, 2, D): a rotary pair is D/2 apart
        return _fused(keys, key_weights), _fused(values, self.value_weights), mask


def _fused(states: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    """Return Σ w ∘ states, from two states (B, H_kv, S, D) and weights (H_kv, 2, D)."""
    first, last = weights[:, 0, None], weights[:, 1, None]  # (H_kv, 1, D)
    return (first * states[0] + last * states[1]).to(states[0].dtype)  # mixed precision keeps weights wider


def _chosen(weights: Tensor, source: int) -> Tensor:
    """Return weights of 1 for one of the two sources and 0 for the other."""
    result = torch.zeros_like(weights)
    result[:, source] = 1
    return result

"""FusedKV: upper layers read weighted sums of the keys and values of two lower layers, and store nothing.

    K_i = w_{i,1} ∘ K_1 + w_{i,n} ∘ K_n,  V_i = u_{i,1} ∘ V_1 + u_{i,n} ∘ V_n,  i > n = L/2
    K_i = K_n,  V_i = V_1  (lite)

The weights are trained, one per head and channel. For keys, the two channels of a rotary pair share a weight, so that
keys can be summed after the rotation as well as before. Training begins with the lite form.

Flows: keys and values of the first layer and of the last of the lower half, as cached. Reads: every layer of the
upper half. Cache: keys and values of the lower half. Source: FusedKV (arXiv 2512.03870).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.core.method import Combined, Config, Method, PerSource, StateReader, Wiring
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class FusedKV(Method):
    """Upper layers read the cached keys and values of two lower layers."""

    lite: bool = False
    """Read keys of the last layer of the lower half and values of the first layer, without weights."""
    start: int | None = None
    """The first layer (0-based) that stores nothing; None: the middle one."""

    def plan(self, layers: int) -> DepthPlan:
        """Let the upper layers read the first layer and the last of the lower half."""
        start = layers // 2 if self.start is None else self.start
        if not 2 <= start < layers:
            raise ValueError(f"fusedkv: start must be 2 to {layers - 1} for {layers} layers, got {start}")
        last, own = start - 1, tuple(range(layers))
        keys = last if self.lite else (0, last)
        values = 0 if self.lite else (0, last)
        above = layers - start
        return DepthPlan(own, own[:start] + (keys,) * above, own[:start] + (values,) * above, own)

    def reader(self, config: Config, wiring: Wiring, layer: int) -> StateReader | None:
        """Return the weighted sum for every upper layer, None in the lite form, which needs no module."""
        assert config.head_dim is not None
        if config.head_dim % 2:
            raise ValueError(f"fusedkv: head_dim must be even, got {config.head_dim}")
        return None if self.plan(config.num_hidden_layers).keys[layer] == layer else _Fusion(config)


class _Fusion(StateReader):
    """Sums the states of two layers with weights per head and channel."""

    split_by_head = {"key_weights": 0, "value_weights": 0}

    def __init__(self, config: Config):
        super().__init__()
        assert config.num_key_value_heads is not None and config.head_dim is not None
        heads, size = config.num_key_value_heads, config.head_dim
        self.key_weights = nn.Parameter(torch.zeros(heads, 2, size // 2))  # (H_kv, 2, D / 2)
        self.value_weights = nn.Parameter(torch.zeros(heads, 2, size))  # (H_kv, 2, D)

    def reset(self) -> None:
        """Begin with keys of the last layer of the lower half and values of the first layer."""
        keys, values = torch.zeros_like(self.key_weights), torch.zeros_like(self.value_weights)
        keys[:, 1] = 1
        values[:, 0] = 1
        init.copy_(self.key_weights, keys)
        init.copy_(self.value_weights, values)

    def forward(self, keys: PerSource, values: PerSource, mask: Tensor | None, new: int) -> Combined:
        """Return the weighted sums of keys and values (B, H_kv, S, D), and the mask unchanged."""
        key_weights = self.key_weights.repeat(1, 1, 2)  # (H_kv, 2, D): a rotary pair is D/2 apart
        sums = []
        for (first, last), weights in ((keys, key_weights), (values, self.value_weights)):
            total = weights[:, 0, None] * first + weights[:, 1, None] * last  # (B, H_kv, S, D)
            # weights may be wider in mixed precision, and attention needs queries, keys and values in one dtype
            sums.append(total.to(first.dtype))
        return sums[0], sums[1], mask

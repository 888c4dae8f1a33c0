"""Nested: values pass a linear map and scales, as a method may bring modules inside of its module.

    V' = s V + V W

Flows: nothing. Reads: nothing. Cache: unchanged. Source: these tests.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init

from crosslayer.core.method import HeadMixer, Method

FACTOR = 2.0


@dataclass(frozen=True)
class Nested(Method):
    """A method whose mixer holds a module, and a buffer that is not saved."""

    def heads(self, config, wiring, layer):
        """Mix every layer's values."""
        return Mixer(config.head_dim)


class Mixer(HeadMixer):
    """V' = s V + V W with s = 2; W begins at zero, while the bias begins where that of any linear map does."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("scale", torch.full((size,), FACTOR), persistent=False)

    def reset(self):
        """Set W and s."""
        init.zeros_(self.linear.weight)
        init.constant_(self.scale, FACTOR)

    def before(self, q, k, v, carry):
        """Change v (B, H_kv, T, D)."""
        return q, k, None if v is None else v * self.scale + self.linear(v), carry

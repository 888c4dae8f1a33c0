"""Latents: each layer caches a latent of its keys and values, and makes them of it and of the layer below.

    c_n = W_a Norm(x_n) − W_p [K_m ‖ V_m] + a,   m = the layer below in the group
    [K_n ‖ V_n] = W_b c_n + W_d [K_m ‖ V_m] + b

With `bits` the cache holds codes, of as many bits as a channel is worth, and the layer itself computes with them:

    s = max(rms(c), |c| / range of channels with 4 bits or more),  code = round(c / (s Δ) − ½) + ½ within its bits

A channel is read as s · code, and its step Δ is part of W_b.

Keys are made before qk-norm and rotary embedding, which are applied when they are read; the positions of cached tokens
follow from the mask. Codes are rounded when they are made, so that every way to run the model reads the same.

Flows: keys and values, as they were made of latents, to the next layer of the group. Reads: each layer its own latents.
Cache: a latent of each layer. Source: MLA (DeepSeek-V2, arXiv 2405.04434); in pretrained models Palu (arXiv 2407.21118)
within a layer, xKV (arXiv 2503.18893) across layers. New here: each layer's latent holds only what the layer below does
not tell, and its channels have bits by what an error costs.

Shapes: W = 2·H_kv·D channels of keys and values.
"""

from dataclasses import dataclass

from crosslayer.core.latents import LatentMethod
from crosslayer.core.options import check_layers
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class KVLatents(LatentMethod):
    """Every layer caches a latent; within a group a layer's keys and values begin with those of the layer below."""

    def plan(self, layers: int) -> DepthPlan:
        """Give each layer a latent, and let it read the layer below in its group."""
        groups = (tuple(range(layers)),) if self.groups is None else self.groups
        check_layers(self.name(), "groups", [layer for group in groups for layer in group], layers)
        read: list[int | tuple[int, ...]] = list(range(layers))
        for group in groups:
            if list(group) != sorted(group):
                raise ValueError(f"{self.name()}: the layers of a group must be in rising order, got {list(group)}")
            for below, layer in zip(group[:-1], group[1:], strict=True):
                read[layer] = (below, layer)
        own = tuple(range(layers))
        return DepthPlan(own, tuple(read), tuple(read), own, latents=self.latent_sizes(layers))

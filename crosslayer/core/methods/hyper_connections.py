"""Hyper-connections (mHC): each sublayer reads a weighted sum of several streams and mixes them doubly stochastically.

    x = Σ_n pre_n X_n,  X'_m = Σ_n comb_{n→m} X_n + post_m f(x)
    pre = σ(s₁ W₁r + b₁) + ε,  post = 2 σ(s₂ W₂r + b₂),  comb = Sinkhorn(softmax_m(s₃ W₃r + b₃) + ε)

r is the concatenation of a token's streams divided by its root mean square; ε = 1e-6; Sinkhorn divides by the sums of
columns and rows alternately, columns first and last. The streams begin as copies of the embedding; the final norm reads
a sum with its own `pre`. Weights are computed in float32. W begins like other matrices, b at 0, s at 0.01 (the paper's
Table 5): the streams are then averaged and each gets the update, nearly as in a plain Transformer.

This is the manifold-constrained form (mHC). The unconstrained form (arXiv 2409.19606), which computes its weights
differently, is not implemented.

Flows: the streams. Reads: every sublayer and the final norm. Cache: unchanged. Source: mHC (arXiv 2512.24880), in the
form of DeepSeek-V4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.core.depth_attention import inverse_rms, wide
from crosslayer.core.method import Carry, Config, Method, Residual, Wiring

EPS = 1e-6
# s at the start, the paper's gating factor: logits of a fresh tiny model are 4e-4 from Llama's; with s = 1, as
# transformers initializes DeepSeek-V4, 4e-2
SCALE = 0.01
MIX = "hyper_connections.mix"


@dataclass(frozen=True)
class HyperConnections(Method):
    """Several residual streams instead of one."""

    streams: int = 4
    """N: the number of residual streams."""
    iterations: int = 20
    """Iterations of Sinkhorn; more come closer to a doubly stochastic matrix."""

    def __post_init__(self):
        if self.streams < 2:
            raise ValueError(f"hyper_connections: streams must be at least 2, got {self.streams}")
        if self.iterations < 1:
            raise ValueError(f"hyper_connections: iterations must be at least 1, got {self.iterations}")

    def residual(self, config: Config, wiring: Wiring, layer: int, site: str) -> Residual:
        """Let every sublayer mix the streams; the first one copies them from the embedding."""
        return _Mix(config, self, first=(layer, site) == wiring.sublayers[0])

    def final(self, config: Config, wiring: Wiring) -> Residual:
        """Let the final norm read with its own weights."""
        return _Collapse(config, self.streams, scales=1)


class _Collapse(Residual):
    """Reads Σ_n pre_n X_n; `scales` is the number of scales s, the first of which belongs to `pre`.

    Shapes: N streams, K weights per token.
    """

    def __init__(self, config: Config, streams: int, scales: int):
        super().__init__()
        weights = streams if scales == 1 else (2 + streams) * streams
        self.streams, self.eps, self.std = streams, config.rms_norm_eps, config.initializer_range
        self.fn = nn.Parameter(torch.zeros(weights, streams * config.hidden_size))  # (K, N·C)
        self.base = nn.Parameter(torch.zeros(weights))  # (K,)
        self.scale = nn.Parameter(torch.full((scales,), SCALE))

    def reset(self) -> None:
        """Begin with weights that depend little on the token."""
        init.normal_(self.fn, mean=0.0, std=self.std)
        init.zeros_(self.base)
        init.constant_(self.scale, SCALE)

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the weighted sum (B, T, C) of the streams (B, T, N, C)."""
        streams = wide(stream)
        return self._mix(streams, self._weights(streams)).to(stream.dtype), carry

    def _weights(self, streams: Tensor) -> Tensor:
        """Return W r of the streams (B, T, N, C), tokens last: (K, B, T)."""
        flat = streams.flatten(2)  # (B, T, N·C)
        # with tokens last in memory Sinkhorn took 1.7 ms instead of 9.6
        return (flat @ self.fn.to(flat.dtype).T * inverse_rms(flat, self.eps)).movedim(-1, 0).contiguous()

    def _mix(self, streams: Tensor, weights: Tensor) -> Tensor:
        pre = self._scaled(weights, 0, slice(0, self.streams)).sigmoid() + EPS  # (N, B, T)
        # (B, T, 1, N) @ (B, T, N, C) → (B, T, C)
        return (pre.movedim(0, -1).unsqueeze(-2).contiguous() @ streams).squeeze(-2)

    def _scaled(self, weights: Tensor, scale: int, rows: slice) -> Tensor:
        """Return s W r + b for some rows of the weights, (rows, B, T)."""
        base = self.base[rows].to(weights.dtype)[:, None, None]
        return weights[rows] * self.scale[scale].to(weights.dtype) + base


class _Mix(_Collapse):
    """Mixes the streams too, and adds the update to them."""

    def __init__(self, config: Config, method: HyperConnections, first: bool):
        super().__init__(config, method.streams, scales=3)
        self.iterations, self.first = method.iterations, first

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the weighted sum (B, T, C) of the streams (B, T, N, C); the very first sublayer gets (B, T, C)."""
        count = self.streams
        streams = wide(stream.unsqueeze(2).expand(-1, -1, count, -1) if self.first else stream)
        weights = self._weights(streams)
        post = 2 * self._scaled(weights, 1, slice(count, 2 * count)).sigmoid()  # (N, B, T)
        comb = self._scaled(weights, 2, slice(2 * count, None)).unflatten(0, (count, count))  # (N, N, B, T): from, to
        comb = comb.softmax(dim=1) + EPS
        # Sinkhorn: the softmax has divided rows by their sums, so that columns come first
        for step in range(2 * self.iterations - 1):
            # the backward pass of a product takes half the operators of a quotient's
            comb = comb * (comb.sum(dim=step % 2, keepdim=True) + EPS).reciprocal()
        return self._mix(streams, weights).to(stream.dtype), {**carry, MIX: (post, comb)}

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        post, comb = carry[MIX]
        post, comb = post.to(stream.dtype), comb.to(stream.dtype)
        streams = stream.unsqueeze(2).expand(-1, -1, self.streams, -1) if self.first else stream
        # Products of contiguous matrices, all tokens at once: with other strides they are computed token by token. The
        # update is added by a product too, which keeps nothing of the size of the streams for the backward pass.
        added = post.movedim(0, -1).contiguous().unsqueeze(-1) @ update.unsqueeze(-2)  # (B, T, N, 1) @ (B, T, 1, C)
        mixed = comb.permute(2, 3, 1, 0).contiguous() @ streams  # (B, T, N, N) @ (B, T, N, C)
        return mixed + added, {name: value for name, value in carry.items() if name != MIX}

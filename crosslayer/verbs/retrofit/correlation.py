"""How much of what attention makes of the stream a linear map must leave, bounded by canonical correlations.

    NMSE = E‖y − ŷ‖² / tr Cov(y)  ≤  rank Cov(y) − Σ ρ_i²,  ŷ = the linear map of x, with bias, that errs least

x is the stream that enters a layer and y = x + Attn(Norm(x)) the stream after its attention; ρ_i are the singular
values of Cov(x)^(−1/2) Cov(x, y) Cov(y)^(−1/2). With covariances of full rank this is Σ (1 − ρ_i²), by which
arXiv 2505.21077 ranks layers; its code takes these x and y. W_c reads Norm(x), which the bound does not know.

Shapes: N sequences, B of a batch, T tokens, C hidden, L layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.moments import NEEDED
from crosslayer.verbs.retrofit.streams import Streams

SMALLEST = 1e-13  # of the largest eigenvalue: below it a direction of no weight


@torch.no_grad()
def error_bounds(model: PreTrainedModel, ids: Tensor, step: Callable[[int, int], None]) -> list[float]:
    """Return the bound of each layer, (L,), on token ids (N, T).

    Memory: the stream at a single layer for all tokens, and second moments of that layer.

    Raises:
        ValueError: there are too few tokens, so that any two streams would seem correlated.

    """
    plain = convert(model, []).model
    assert isinstance(plain, CrossLayerForCausalLM)
    width, layers = plain.config.hidden_size, plain.config.num_hidden_layers
    if ids.numel() < NEEDED * width:
        raise ValueError(
            f"`select` correlation: calibration text has {ids.numel()} tokens; it needs at least {NEEDED * width} "
            f"({NEEDED} for each of the {width} channels of the stream)"
        )
    streams = Streams(plain, plain, ids, follow="rewired")
    bounds = []
    for layer in range(layers):
        moments = _JointMoments(width, streams.after[0])
        for before, after in streams.around_attention(layer):
            moments.add(before.flatten(0, 1), after.flatten(0, 1))
        bounds.append(moments.bound())
        if layer < layers - 1:
            streams.advance(layer)
        step(layer + 1, layers)
    return bounds


class _JointMoments:
    """First and second moments of rows x and y, in float64."""

    def __init__(self, width: int, like: Tensor):
        double = {"dtype": torch.float64, "device": like.device}
        self.rows, self.width = 0, width
        self.sum = torch.zeros(2 * width, **double)  # of x and y, (2C,)
        self.gram = torch.zeros(2 * width, 2 * width, **double)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows of x and y, (B·T, C) each."""
        both = torch.cat([x.double(), y.double()], dim=1)
        self.rows += len(both)
        self.sum += both.sum(0)
        self.gram += both.T @ both

    def bound(self) -> float:
        """Return rank Cov(y) − Σ ρ_i²."""
        mean = self.sum / self.rows
        covariance = self.gram / self.rows - torch.outer(mean, mean)
        x, y = slice(0, self.width), slice(self.width, None)
        left, _ = _whitening(covariance[x, x])
        right, rank = _whitening(covariance[y, y])
        correlations = torch.linalg.svdvals(left.T @ covariance[x, y] @ right).clamp(max=1)
        return rank - float(correlations.square().sum())


def _whitening(covariance: Tensor) -> tuple[Tensor, int]:
    """Return V with Vᵀ Cov V = 1 (C, R), and the rank R of the covariance (C, C)."""
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1] * SMALLEST
    return vectors[:, kept] * values[kept].rsqrt(), int(kept.sum())

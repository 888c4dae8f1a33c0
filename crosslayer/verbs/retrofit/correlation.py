"""How much of what attention makes of the stream a linear map must leave, bounded by canonical correlations.

    NMSE = E‖y − ŷ‖² / tr Cov(y)  ≤  rank Cov(y) − Σ ρ_i²,  ŷ = the linear map of x, with bias, that errs least

x is the stream that enters a layer and y = x + Attn(Norm(x)) the stream after its attention; ρ_i are the singular
values of Cov(x)^(−1/2) Cov(x, y) Cov(y)^(−1/2). With covariances of full rank this is Σ (1 − ρ_i²), by which
arXiv 2505.21077 ranks layers; its code takes these x and y. W_c reads Norm(x), which the bound does not know.

Shapes: N sequences, B of a batch, T tokens, C hidden, L layers.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.verbs.retrofit.convert import plain_decoder
from crosslayer.verbs.retrofit.moments import NEEDED, SMALLEST
from crosslayer.verbs.retrofit.streams import Streams


@torch.no_grad()
def error_bounds(model: PreTrainedModel, ids: Tensor, step: Callable[[int, int], None]) -> list[float]:
    """Return the bound of each layer, (L,), on token ids (N, T).

    Memory: the stream at a single layer for all tokens, and second moments of that layer.

    Raises:
        ValueError: there are too few tokens, so that any two streams would seem correlated.

    """
    plain = plain_decoder(model)
    width, layers = plain.config.hidden_size, plain.config.num_hidden_layers
    if ids.numel() < NEEDED * width:
        raise ValueError(
            f"`select` correlation: calibration text has {ids.numel()} tokens; it needs at least {NEEDED * width} "
            f"({NEEDED} for each of the {width} channels of the stream)"
        )
    streams = Streams(plain, plain, ids, follow="rewired")
    bounds = []
    for layer in range(layers):
        bounds.append(_bound(streams.around_attention(layer), width, streams.after[0].device))
        if layer < layers - 1:
            streams.advance(layer)
        step(layer + 1, layers)
    return bounds


def _bound(pairs: Iterable[tuple[Tensor, Tensor]], width: int, device: torch.device) -> float:
    """Return rank Cov(y) − Σ ρ_i², from batches of x and y, (B, T, C) each; in float64."""
    rows, total = 0, torch.zeros(2 * width, dtype=torch.float64, device=device)  # of x and y, (2C,)
    gram = torch.zeros(2 * width, 2 * width, dtype=torch.float64, device=device)
    for pair in pairs:
        both = torch.cat(pair, dim=-1).flatten(0, 1).double()  # (B·T, 2C)
        rows += len(both)
        total += both.sum(0)
        gram += both.T @ both
    covariance = gram / rows - torch.outer(total / rows, total / rows)
    left, _ = _whitening(covariance[:width, :width])
    right, rank = _whitening(covariance[width:, width:])
    correlations = torch.linalg.svdvals(left.T @ covariance[:width, width:] @ right).clamp(max=1)
    return rank - float(correlations.square().sum())


def _whitening(covariance: Tensor) -> tuple[Tensor, int]:
    """Return V with Vᵀ Cov V = 1 (C, R), and the rank R of the covariance (C, C)."""
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1] * SMALLEST
    return vectors[:, kept] * values[kept].rsqrt(), int(kept.sum())

"""The measures of a sequence: pure functions on tensors, each with its source.

Shapes: T tokens, C hidden, H key-value heads, D head size, L layers.

Sources by arXiv numbers: 2410.17897 (Value Residual Learning), 2406.15786 (What Matters in Transformers?), 2403.03853
(ShortGPT), 2502.00439 (softmax unification), 2407.01601 (the waiver), 2402.17762 (massive activations).
"""

import torch
from torch import Tensor
from torch.nn import functional

# Instead of 0 ÷ 0, a vector of zeros is at right angles to every other. Far below the norm of any state.
SMALLEST_NORM = 1e-12
MEDIAN_TOKENS = 64  # the median of a layer's hidden states is computed from at least this many tokens


def working(x: Tensor) -> Tensor:
    """Return `x` in the type that measures are computed in: float32, or float64 if it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def over_median(x: Tensor, position: int = 0) -> Tensor:
    """Return a token over the median of the other tokens, (..., T) → (...), with T ≥ 2."""
    others = torch.cat([x[..., :position], x[..., position + 1 :]], dim=-1)
    # `median` would return the lower of the two middle values
    return x[..., position] / others.quantile(0.5, dim=-1)


def hidden_norms(stream: Tensor) -> Tensor:
    """Return the L2 norm of each token, (T, C) → (T,). High at token 0: a hidden-state peak."""
    return working(stream).norm(dim=-1)


def value_norms(value: Tensor) -> Tensor:
    """Return the L2 norm over the head size, averaged over heads, (H, T, D) → (T,). Low at token 0: a value drain."""
    return working(value).norm(dim=-1).mean(dim=0)


def cosines_with_queries(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cosine of later queries with the first key, and with the keys between, () each.

    `query` (H, T, D) and `key` (H_kv, T, D), as attention takes them; the waiver's Eq. 6: Q · K = ‖Q‖ ‖K‖ cos θ.
    """
    queries = functional.normalize(working(query), dim=-1)
    keys = functional.normalize(working(key), dim=-1).repeat_interleave(len(query) // len(key), dim=0)  # (H, T, D)
    first = torch.linalg.vecdot(queries[:, 1:], keys[:, :1])  # (H, T − 1)
    before = keys[:, 1:-1].cumsum(dim=1)  # sums of the keys from the second to each
    counts = torch.arange(1, before.shape[1] + 1, device=query.device)
    others = torch.linalg.vecdot(queries[:, 2:], before) / counts  # (H, T − 2)
    return first.mean(), others.mean() if others.numel() else others.new_tensor(torch.nan)


def value_spectrum(value: Tensor) -> Tensor:
    """Return the eigenvalues of (1/T) Σ v vᵀ with all heads in a single vector v, largest first, (H, T, D) → (H·D,).

    Eq. 12 of 2410.17897. With fewer tokens than dimensions the non-zero ones come from the (T, T) Gram matrix.
    """
    heads, tokens, size = value.shape
    flat = working(value).transpose(0, 1).reshape(tokens, heads * size)  # (H, T, D) → (T, H·D)
    small = tokens < heads * size
    matrix = (flat @ flat.T if small else flat.T @ flat).double() / tokens
    # none is negative but for rounding
    eigenvalues = torch.linalg.eigvalsh(matrix).flip(0).clamp_min(0)
    return torch.cat([eigenvalues, eigenvalues.new_zeros(heads * size - len(eigenvalues))])


def token_similarity(stream: Tensor) -> Tensor:
    """Return the mean cosine of all pairs of different tokens, (T, C) → (), in time linear in T.

    Eq. 13 of 2410.17897: with unit vectors u_i, the sum over i ≠ j is ‖Σ u_i‖² − T. High means over-smoothing.
    """
    tokens = len(stream)
    sum_of_units = working(stream).T @ hidden_norms(stream).clamp_min(SMALLEST_NORM).reciprocal()  # (C,)
    return (sum_of_units.double().square().sum() - tokens) / (tokens * (tokens - 1))


def mean_cosine(before: Tensor, after: Tensor) -> Tensor:
    """Return cos(before, after) averaged over the tokens, (T, C) twice → ().

    2406.15786 ranks attention by cos(x, x + Attn(x)), ShortGPT layers by cos(x, layer(x)): near 1 means redundant.
    """
    products = torch.linalg.vecdot(working(before), working(after))  # (T,)
    norms = hidden_norms(before).clamp_min(SMALLEST_NORM) * hidden_norms(after).clamp_min(SMALLEST_NORM)
    return (products / norms).mean()


def depth_factor(before: Tensor, after: Tensor) -> Tensor:
    """Return ‖after − before‖ / ‖before‖ averaged over the tokens, (T, C) twice → () (2502.00439, Eq. 7)."""
    return (hidden_norms(after - before) / hidden_norms(before).clamp_min(SMALLEST_NORM)).mean()


def softmax_response(scores: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Return ‖J‖ and ‖J δ‖ / ‖p‖ averaged over rows, of scores and their change δ, (..., S) twice → () each.

    p = softmax(scores), J = diag(p) − p pᵀ, ‖J‖² = Σp² − 2 Σp³ + (Σp²)² (2502.00439, appendices C and G).
    """
    p = scores.softmax(dim=-1)
    square = p.square().sum(dim=-1)
    # 0 for a row with a single weight of 1, where rounding may leave a negative number
    jacobian = (square - 2 * p.pow(3).sum(dim=-1) + square.square()).clamp_min(0).sqrt()
    moved = p * (change - torch.linalg.vecdot(p, change)[..., None])
    return jacobian.mean(), (moved.norm(dim=-1) / square.sqrt()).mean()


def l1_over_l2(update: Tensor) -> Tensor:
    """Return ‖u‖₁ / ‖u‖₂ of each token, (T, C) → (T,): √C for a flat vector, 1 for a single peak (the waiver, 3.3)."""
    return working(update).norm(p=1, dim=-1) / working(update).norm(dim=-1)


def channel_ratios(update: Tensor) -> Tensor:
    """Return |u| over its median, (C,) → (C,): huge in the channels of a massive activation (the waiver, Fig. 1)."""
    sizes = working(update).abs()
    return sizes / sizes.quantile(0.5).clamp_min(SMALLEST_NORM)


def activation_ratios(hidden: Tensor) -> Tensor:
    """Return values and their magnitudes over the median, of token 0 and of the largest others, (T, C) → (2, 2, C).

    The others are each channel's largest |x| after token 0; the median is that of |x| (Sun et al. 2402.17762).
    """
    hidden = working(hidden)
    sizes = hidden.abs()
    # The median of all 512 × 576 values of a layer takes 6 ms on a CPU core. That of 64 evenly spaced tokens is 0.91 to
    # 1.09 of it in the layers of SmolLM2, Qwen2.5-Coder-0.5B and Gemma 3 270M (three texts).
    median = sizes[:: max(1, len(sizes) // MEDIAN_TOKENS)].median()
    others = hidden[1:].gather(0, sizes[1:].argmax(dim=0, keepdim=True))  # (1, C)
    values = torch.cat([hidden[:1], others])  # (2, C)
    return torch.stack([values, values.abs() / median.clamp_min(SMALLEST_NORM)], dim=1)


def importance(column_sums: Tensor) -> Tensor:
    """Return a' = a / Σa from column sums of the maps over all rows and heads, (L, T) → (L, T) (2410.17897, 4.1.3)."""
    return column_sums / column_sums.sum(dim=-1, keepdim=True)


def entropy(shares: Tensor) -> Tensor:
    """Return −Σ a' ln a', (L, T) → (L,); low means that attention is concentrated (2410.17897, Eq. 11)."""
    return torch.special.entr(shares).sum(dim=-1)


def top_importance(shares: Tensor, count: int = 10) -> Tensor:
    """Return the `count` largest a' of each layer, (L, T) → (L, count)."""
    return shares.topk(min(count, shares.shape[-1]), dim=-1).values


def gram_cosine(gram: Tensor) -> Tensor:
    """Turn inner products (..., L, L) of flattened maps into cosines; a layer without a map gives NaN."""
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    return gram / (norms[..., :, None] * norms[..., None, :])

"""Attention over depth: the definition, and kernels for CPUs and GPUs without Triton, of few operators of torch.

`listed` is the definition, source by source, with operators that autograd and `torch.func` know. The kernels take
sources that lie one behind another in memory as one operand, which is several times faster.

Shapes: T tokens of all sequences, N sources, R readers, C hidden.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Largest number of elements of all sources together that are stacked: below it the time of a read is that of its
# operators, and one operand needs few.
STACKED = 1 << 18


def listed(sources: Sequence[Tensor], direction: Tensor, eps: float, normed: bool = False) -> Tensor:
    """Return Σ_i α_i v_i (…, C) over sources (…, C) for a direction (C,); `normed`: of v_i / rms(v_i)."""
    with exact(direction.device):
        # the softmax in float32 or wider, as published; the sum in the model's dtype
        shares = torch.stack([depth_scores(source, direction, eps) for source in sources]).softmax(dim=0)  # (N, …)
        if normed:
            shares = shares * torch.stack([inverse_rms(wide(source), eps).squeeze(-1) for source in sources])
        shares = shares.to(sources[0].dtype).unsqueeze(-1)  # (N, …, 1)
        terms = [share * source for share, source in zip(shares, sources, strict=True)]
        return functools.reduce(torch.add, terms)


def depth_scores(source: Tensor, direction: Tensor, eps: float) -> Tensor:
    """Return dᵀ v / rms(v) in float32 or wider for a direction (C,) and v (…, C): (…)."""
    source = wide(source)
    return source @ direction.to(source.dtype) * inverse_rms(source, eps).squeeze(-1)


def inverse_rms(source: Tensor, eps: float) -> Tensor:
    """Return 1 / rms(v) of v (…, C): (…, 1)."""
    return torch.rsqrt(source.square().mean(-1, keepdim=True) + eps)


def wide(source: Tensor) -> Tensor:
    """Return a tensor in float32, or in its own type where that is wider."""
    return source if source.dtype.itemsize >= 4 else source.float()


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """Keep autocast from rounding scores."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the type of a sum of tensors."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def attend(
    sources: Sequence[Tensor], direction: Tensor, eps: float, normed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum (…, C) of sources (…, C), the scores and the inverse RMS of sources, (N, T) each."""
    with exact(direction.device):
        if len(sources) * sources[0].numel() <= STACKED:
            result, scores, norms = _stacked(sources, direction, eps, normed)
            inverse = norms.T.reciprocal().mul_(math.sqrt(len(direction)))  # (N, T)
            result = result.to(promoted(sources)).view(sources[0].shape)
            return result, scores.T.contiguous(), inverse.contiguous()
        dtype = torch.promote_types(promoted(sources), torch.float32)
        operands = operands_of(sources)
        # as norms, since a mean of squares would copy the sources in the wide type first
        norms = torch.cat([torch.linalg.vector_norm(values, dim=-1, dtype=dtype) for values in operands])
        inverse = norms.square_().div_(len(direction)).add_(eps).rsqrt_()  # (N, T)
        tokens = inverse.shape[1]
        scores = _products(operands, direction.to(dtype).expand(tokens, -1)).mul_(inverse)
        weights = scores.softmax(dim=0)
        result = _weighted(operands, (weights.mul_(inverse) if normed else weights).to(promoted(sources)))
        return result.view(sources[0].shape), scores, inverse


def read(sources: Sequence[Tensor], direction: Tensor, eps: float, normed: bool = False) -> Tensor:
    """Return the weighted sum (…, C) alone, as inference needs it."""
    newest = sources[-1]
    if len(sources) * newest.numel() > STACKED or torch.is_autocast_enabled(newest.device.type):
        return attend(sources, direction, eps, normed)[0]
    return _stacked(sources, direction, eps, normed)[0].to(newest.dtype).view(newest.shape)


def differentiate(
    grad: Tensor, scores: Tensor, inverse: Tensor, sources: Sequence[Tensor], direction: Tensor, normed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what gradients are made of, for the gradient (…, C) of the weighted sum.

    Returns:
        the weights of the sources (α, over rms(v) if they are normed), the gradients of scores over rms(v), and the
        multiples of the sources themselves, since their norms divide the scores, (N, T) each; the gradient of the
        direction, (C,).
    """
    with exact(direction.device):
        operands, shares = operands_of(sources), scores.softmax(dim=0)
        shares = shares.mul_(inverse) if normed else shares
        weighted = shares * _products(operands, grad.reshape(-1, grad.shape[-1]).to(shares.dtype))  # (N, T)
        # The mean that a softmax's gradient needs is summed here, and not taken from the result · grad: a result in
        # bfloat16 gave the direction's gradient an error of 1.34 of its size where sources resemble one another.
        slopes = weighted - (shares / inverse if normed else shares) * weighted.sum(dim=0)  # of the scores
        through_norms = slopes * scores
        if normed:  # the norms divide the values, too
            through_norms += weighted
        shrink = through_norms.mul_(inverse.square()).div_(-len(direction))
        slopes = slopes.mul_(inverse)
        return shares, slopes, shrink, _weighted(operands, slopes).sum(dim=0)


def source_gradient(
    source: Tensor,
    grads: Sequence[Tensor],
    shares: Sequence[Tensor],
    slopes: Sequence[Tensor],
    shrinks: Sequence[Tensor],
    directions: Sequence[Tensor],
    arrived: Tensor | None,
) -> Tensor:
    """Return the gradient of a source (…, C): what arrived, and a term of each reader.

    Args:
        source: the source.
        grads: (…, C), the gradient of each reader's result.
        shares: (T,), α of the source for each reader; with slopes and shrinks as `differentiate` returns them.
        slopes: (T,) for each reader.
        shrinks: (T,) for each reader.
        directions: (C,) for each reader.
        arrived: (…, C), the gradient from elsewhere.
    """
    with exact(source.device):
        dtype = shares[0].dtype
        stacked = torch.stack([direction.to(dtype) for direction in directions])  # (R, C)
        result = torch.mm(torch.stack(tuple(slopes), dim=1), stacked)  # (T, C)
        shrink = functools.reduce(torch.add, shrinks)
        for values, weights in zip((source, *grads), (shrink, *shares), strict=True):
            result.addcmul_(values.reshape(result.shape), weights.unsqueeze(1))
        result = result.to(source.dtype).view(source.shape)
        return result if arrived is None else result.add_(arrived)


def operands_of(sources: Sequence[Tensor]) -> list[Tensor]:
    """Return sources (…, C) in order as few operands (n, T, C): neighbors in memory form one operand."""
    neighbors: list[list[Tensor]] = []
    for source in sources:
        before = neighbors[-1][-1] if neighbors else None
        if (
            before is not None
            and before.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            and before.storage_offset() + before.numel() == source.storage_offset()
            and (before.shape, before.dtype) == (source.shape, source.dtype)
            and before.is_contiguous()
            and source.is_contiguous()
        ):
            neighbors[-1].append(source)
        else:
            neighbors.append([source])

    operands = []
    for group in neighbors:
        first = group[0].reshape(1, -1, group[0].shape[-1])
        strides = (first.numel(), first.shape[-1], 1)
        operands.append(first if len(group) == 1 else first.as_strided((len(group), *first.shape[1:]), strides))
    return operands


def _stacked(sources: Sequence[Tensor], direction: Tensor, eps: float, normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum (T, 1, C) and scores (T, N) for a direction (C,), and the norms √C · rms(v), (T, N).

    It copies the sources: for few tokens, more operators would cost more.
    """
    width = len(direction)
    stacked = wide(torch.stack(tuple(sources), dim=-2).view(-1, len(sources), width))  # (T, N, C)
    # √(Σv² + C·eps), by one operator from the norm instead of a square, a sum and a root
    floor = _scalar(math.sqrt(width * eps), stacked.dtype, stacked.device)
    norms = torch.hypot(torch.linalg.vector_norm(stacked, dim=-1), floor)
    scores = torch.matmul(stacked, direction.to(stacked.dtype)).mul_(math.sqrt(width)).div_(norms)
    weights = scores.softmax(-1)
    if normed:
        weights = weights.mul_(math.sqrt(width)).div_(norms)
    return torch.bmm(weights.unsqueeze(1), stacked), scores, norms


# made once: as a new tensor it would be one more operator in every read
@functools.cache
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _weighted(operands: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return Σ_i w_i v_i (T, C) of operands (n, T, C) and weights (N, T), in the weights' type."""
    result, alone = None, []
    for values, shares in zip(operands, weights.split([len(v) for v in operands]), strict=True):
        # as a product of matrices a single source would take thirty times as long
        if len(values) == 1:
            alone.append((values[0], shares[0].unsqueeze(1)))
            continue
        # (T, 1, n); non-contiguous, they would make it five times slower
        columns = shares.T.contiguous().unsqueeze(1)
        across = values.to(weights.dtype).transpose(0, 1)  # (T, n, C)
        result = torch.bmm(columns, across) if result is None else result.baddbmm_(columns, across)
    if result is None:
        values, share = alone.pop()
        result = values * share
    else:
        result = result.squeeze(1)
    for values, share in alone:
        result.addcmul_(values, share)
    return result


def _products(operands: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return the products of operands (n, T, C) and rows (T, C), token by token: (N, T), in the rows' type."""
    products = []
    for values in operands:
        across = values.to(rows.dtype).permute(1, 2, 0)  # (T, C, n)
        # twice as fast as `mv`, or as a product and a sum
        products.append(torch.bmm(rows.unsqueeze(1), across).squeeze(1).T)
    return torch.cat(products)

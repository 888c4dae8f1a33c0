"""The definition of attention over depth, source by source, with operators that autograd and `torch.func` know.

Shapes: N sources, C hidden.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def listed(sources: Sequence[Tensor], direction: Tensor, eps: float) -> Tensor:
    """Return Σ_i α_i v_i (…, C) over sources (…, C) for a direction (C,)."""
    shares = torch.stack([depth_scores(source, direction, eps) for source in sources]).softmax(dim=0)  # (N, …)
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


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or a type that is wider."""
    return torch.promote_types(dtype, torch.float32)


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """Keep autocast from rounding scores."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the type of a sum of tensors."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))

"""Sinkhorn's normalization of a small positive matrix for each token, as an operator of torch with its own gradient.

    y = x / s,  s = Σ x + ε along columns or rows;  dx = (dy − Σ dy y) / s,  x = y s

Backward, the divisions are undone from the last to the first, so that of all steps only the sums are kept. For GPUs the
whole of it is one kernel of `crosslayer.core.kernels`.

Shapes: N rows and columns, T tokens, S = 2 · iterations − 1 divisions.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from crosslayer.core import custom_ops

EPS = 1e-6

_OPERATORS = torch.ops.crosslayer


def doubly_stochastic(matrix: Tensor, iterations: int) -> Tensor:
    """Divide a positive matrix (from, to, …) by the sums of its columns, then of rows and columns alternately."""
    if custom_ops.uses_definition():
        return definition(matrix, iterations)
    flat = matrix.flatten(2).contiguous()  # (N, N, T)
    return _OPERATORS.doubly_stochastic(flat, iterations)[0].view(matrix.shape)


def definition(matrix: Tensor, iterations: int) -> Tensor:
    """Compute `doubly_stochastic` with operators that autograd and `torch.func` know."""
    for number in range(2 * iterations - 1):
        matrix = matrix / (matrix.sum(dim=number % 2, keepdim=True) + EPS)
    return matrix


def _normalize(matrix: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Return the result (N, N, T), and what was divided by (S, N, T)."""
    kernels = _kernels(matrix)
    if kernels is not None:
        return kernels.doubly_stochastic(matrix.contiguous(), iterations, EPS)
    result = matrix.clone(memory_format=torch.contiguous_format)
    sums = matrix.new_empty(2 * iterations - 1, *matrix.shape[1:])
    for number, total in enumerate(sums):
        torch.sum(result, dim=number % 2, out=total)
        result.div_(total.add_(EPS).unsqueeze(number % 2))
    return result, sums


def _differentiate(grad: Tensor, result: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient of the matrix (N, N, T)."""
    kernels = _kernels(grad)
    if kernels is not None:
        return kernels.backward(grad.contiguous(), result, sums)
    grad, result = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (grad, result))
    for number in reversed(range(len(sums))):
        axis = number % 2
        total = sums[number].unsqueeze(axis)
        grad.sub_((grad * result).sum(axis, keepdim=True)).div_(total)
        result.mul_(total)
    return grad


class _Normalize(torch.autograd.Function):
    """The result, and what was divided by."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, iterations: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        result, sums = custom_ops.without_gradient(_OPERATORS.doubly_stochastic, matrix, iterations)
        ctx.iterations = iterations
        ctx.mark_non_differentiable(sums)
        ctx.save_for_backward(matrix, result, sums)
        return result, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrix, result, sums = ctx.saved_tensors
        if custom_ops.differentiates_definition(grad):
            again = functools.partial(definition, iterations=ctx.iterations)
            return custom_ops.gradients_of_definition(again, [matrix], grad, [True])[0], None
        return _OPERATORS.doubly_stochastic_backward(grad, result, sums), None


def _kernels(matrix: Tensor) -> Any:
    """Return the module of Triton's kernels if they can take a matrix."""
    kernels = custom_ops.triton_kernels("sinkhorn", matrix.device)
    return kernels if kernels is not None and matrix.dtype == torch.float32 and len(matrix) in kernels.TOKENS else None


custom_ops.register(
    "doubly_stochastic(Tensor matrix, int iterations) -> (Tensor, Tensor)",
    _normalize,
    lambda matrix, iterations: (
        matrix.new_empty(matrix.shape),
        matrix.new_empty(2 * iterations - 1, *matrix.shape[1:]),
    ),
)
custom_ops.register(
    "doubly_stochastic_backward(Tensor grad, Tensor result, Tensor sums) -> Tensor",
    _differentiate,
    lambda grad, result, sums: grad.new_empty(grad.shape),
)
custom_ops.register_gradient("doubly_stochastic", _Normalize.apply)

"""Sinkhorn's normalisation of a small positive matrix for each token, as an operator of torch with its own gradient.

    y = x / s,  s = Σ x + ε along columns or rows;  dx = (dy − Σ dy y) / s,  x = y s

Forward, only the sums are kept; backward, the divisions are undone from the last to the first. For GPUs the whole of it
is one kernel of `crosslayer.core.kernels`.

Shapes: N rows and columns, T tokens, S = 2 · iterations − 1 divisions.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from crosslayer.core.depth_attention import is_transformed

EPS = 1e-6

_LIBRARY = torch.library.Library("crosslayer", "FRAGMENT")
_LIBRARY.define("doubly_stochastic(Tensor matrix, int iterations) -> (Tensor, Tensor)")
_LIBRARY.define("doubly_stochastic_backward(Tensor grad, Tensor result, Tensor sums) -> Tensor")
_OPERATORS = torch.ops.crosslayer


def doubly_stochastic(matrix: Tensor, iterations: int) -> Tensor:
    """Divide a positive matrix (from, to, …) by the sums of its columns, then of rows and columns alternately."""
    if is_transformed():
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
    if _has_kernel(matrix):
        return _kernels().doubly_stochastic(matrix, iterations)
    result, sums = matrix.clone(), matrix.new_empty(2 * iterations - 1, *matrix.shape[1:])
    for number, total in enumerate(sums):
        torch.sum(result, dim=number % 2, out=total)
        result.div_(total.add_(EPS).unsqueeze(number % 2))
    return result, sums


def _differentiate(grad: Tensor, result: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient of the matrix (N, N, T)."""
    if _has_kernel(grad):
        return _kernels().backward(grad.contiguous(), result, sums)
    grad, result = grad.clone(), result.clone()
    for number in reversed(range(len(sums))):
        axis = number % 2
        total = sums[number].unsqueeze(axis)
        grad.sub_((grad * result).sum(axis, keepdim=True)).div_(total)
        result.mul_(total)
    return grad


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    matrix, ctx.iterations = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(matrix, *output)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    matrix, result, sums = ctx.saved_tensors
    batched = torch._C._functorch.is_legacy_batchedtensor(grad)  # pyright: ignore[reportAttributeAccessIssue]
    again = torch.is_grad_enabled()
    if not (again or is_transformed() or batched):
        return _OPERATORS.doubly_stochastic_backward(grad, result, sums), None
    with torch.enable_grad():
        matrix = matrix.view_as(matrix)
        output = definition(matrix, ctx.iterations)
    return torch.autograd.grad(output, matrix, grad, create_graph=again)[0], None


@functools.cache
def _kernels() -> Any:
    """Return the module of the kernels for GPUs, None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from crosslayer.core.kernels import sinkhorn

    return sinkhorn


def _has_kernel(matrix: Tensor) -> bool:
    """Return whether Triton's kernels can take a matrix."""
    if matrix.device.type != "cuda" or matrix.dtype != torch.float32 or _kernels() is None:
        return False
    return len(matrix) in _kernels().TOKENS


def _fake_normalize(matrix: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(matrix), matrix.new_empty(2 * iterations - 1, *matrix.shape[1:])


for name, kernel, fake in (
    ("doubly_stochastic", _normalize, _fake_normalize),
    ("doubly_stochastic_backward", _differentiate, lambda grad, *_: torch.empty_like(grad)),
):
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"crosslayer::{name}", fake, lib=_LIBRARY)
torch.library.register_autograd("crosslayer::doubly_stochastic", _backward, setup_context=_remember, lib=_LIBRARY)

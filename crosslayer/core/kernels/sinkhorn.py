# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""Sinkhorn's normalization of small matrices, one for each token, forward and backward in registers.

Shapes: N streams, T tokens, S = 2 · iterations - 1 divisions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = {2: 128, 4: 64, 8: 16}  # tokens of a program, by N; also the sizes that there are
WARPS = 1  # sums of a matrix stay within a warp
FUSED = {"enable_fp_fusion": True}  # as one multiplication and addition; said here, since the default changes


def doubly_stochastic(matrix: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """Divide a positive matrix (from, to, T) by the sums of its columns, then of rows and columns alternately.

    The matrix is (N, N, T) in float32, contiguous, for N of 2, 4 or 8. Returns the result (N, N, T), and what was
    divided by, each sum plus `eps`: (2 · iterations - 1, N, T).
    """
    count, tokens = _shape(matrix)
    result = torch.empty_like(matrix)
    sums = matrix.new_empty(2 * iterations - 1, count, tokens)  # (S, N, T)
    block = TOKENS[count]
    with torch.cuda.device_of(matrix):
        forward_kernel[(triton.cdiv(tokens, block),)](
            matrix, result, sums, tokens, len(sums), eps, COUNT=count, BLOCK=block, num_warps=WARPS, **FUSED
        )
    return result, sums


def backward(grad: Tensor, result: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient (N, N, T) of the matrix, from that of the result and what `doubly_stochastic` returned."""
    count, tokens = _shape(result)
    output = torch.empty_like(result)
    block = TOKENS[count]
    with torch.cuda.device_of(result):
        backward_kernel[(triton.cdiv(tokens, block),)](
            grad, result, sums, output, tokens, len(sums), COUNT=count, BLOCK=block, num_warps=WARPS, **FUSED
        )
    return output


def _shape(matrix: Tensor) -> tuple[int, int]:
    """Return N and T of a matrix (N, N, T)."""
    count, columns, tokens = matrix.shape
    if count != columns or count not in TOKENS:
        raise ValueError(f"Sinkhorn's kernel takes square matrices of 2, 4 or 8 rows, got {count} x {columns}")
    return count, tokens


@triton.jit(do_not_specialize=["tokens", "divisions", "eps"])
def forward_kernel(matrix, result, sums, tokens, divisions, eps, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Normalize a block of matrices."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, there = token[None, None, :], (token < tokens)[None, None, :]
    line = tl.arange(0, COUNT)
    source, target = line[:, None, None], line[None, :, None]
    offsets = (source * COUNT + target) * tokens + token  # (N, N, BLOCK)
    x = tl.load(matrix + offsets, mask=there, other=1.0)
    total = tl.sum(x, axis=0, keep_dims=True) + eps  # (1, N, BLOCK)
    x /= total
    tl.store(sums + target * tokens + token, total, mask=there)
    for division in range(1, divisions, 2):
        total = tl.sum(x, axis=1, keep_dims=True) + eps  # (N, 1, BLOCK)
        x /= total
        tl.store(sums + (division * COUNT + source) * tokens + token, total, mask=there)
        total = tl.sum(x, axis=0, keep_dims=True) + eps  # (1, N, BLOCK)
        x /= total
        tl.store(sums + ((division + 1) * COUNT + target) * tokens + token, total, mask=there)
    tl.store(result + offsets, x, mask=there)


@triton.jit(do_not_specialize=["tokens", "divisions"])
def backward_kernel(grad, result, sums, output, tokens, divisions, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Undo the divisions from the last to the first: for y = x / s, dx = (dy - Σ dy · y) / s and x = y · s."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, there = token[None, None, :], (token < tokens)[None, None, :]
    line = tl.arange(0, COUNT)
    source, target = line[:, None, None], line[None, :, None]
    offsets = (source * COUNT + target) * tokens + token  # (N, N, BLOCK)
    y = tl.load(result + offsets, mask=there, other=0.0)
    dy = tl.load(grad + offsets, mask=there, other=0.0)
    for back in range(1, divisions, 2):
        division = divisions - back
        total = tl.load(sums + (division * COUNT + target) * tokens + token, mask=there, other=1.0)
        dy = (dy - tl.sum(dy * y, axis=0, keep_dims=True)) / total
        y *= total
        total = tl.load(sums + ((division - 1) * COUNT + source) * tokens + token, mask=there, other=1.0)
        dy = (dy - tl.sum(dy * y, axis=1, keep_dims=True)) / total
        y *= total
    total = tl.load(sums + target * tokens + token, mask=there, other=1.0)
    dy = (dy - tl.sum(dy * y, axis=0, keep_dims=True)) / total
    tl.store(output + offsets, dy, mask=there)

"""Sinkhorn's normalization: the operator, its gradient and what torch checks of operators."""

import pytest
import torch

from crosslayer.core.sinkhorn import EPS, definition, doubly_stochastic


def positive(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    return torch.rand(count, count, 2, 3, dtype=dtype, generator=generator) + 0.1


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_are_divided_by_in_turn(count, iterations):
    matrix = positive(count)
    result = doubly_stochastic(matrix, iterations)
    for batch in range(2):
        for token in range(3):
            rows = matrix[..., batch, token].tolist()
            for number in range(2 * iterations - 1):
                columns = [list(column) for column in zip(*rows, strict=True)]
                lines = [[x / (sum(line) + EPS) for x in line] for line in (rows if number % 2 else columns)]
                rows = lines if number % 2 else [list(row) for row in zip(*lines, strict=True)]
            assert torch.allclose(result[..., batch, token], torch.tensor(rows, dtype=torch.float64), atol=1e-14)


def test_gradients_of_both_orders():
    weights = torch.randn(4, 4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for form in (doubly_stochastic, definition):
        matrix = positive(4).requires_grad_()
        loss = (form(matrix, 20) * weights).sum()
        (once,) = torch.autograd.grad(loss, matrix, retain_graph=True)
        (first,) = torch.autograd.grad(loss, matrix, create_graph=True)
        results.append((once, first, *torch.autograd.grad(first.square().sum(), matrix)))
    for one, other in zip(*results, strict=True):
        assert other.abs().max() > 1e-3 and (one - other).abs().max() <= 1e-12 * other.abs().max()


def test_the_operators_are_sound():
    matrix = positive(4).flatten(2)
    names = torch.ops.crosslayer
    torch.library.opcheck(names.doubly_stochastic.default, (matrix.clone().requires_grad_(), 5))
    result, sums = names.doubly_stochastic(matrix, 5)
    grad = torch.randn_like(result)
    for each in (grad, grad.permute(1, 0, 2), grad.permute(2, 0, 1).contiguous().permute(1, 2, 0)):  # in any order
        torch.library.opcheck(names.doubly_stochastic_backward.default, (each, result, sums))

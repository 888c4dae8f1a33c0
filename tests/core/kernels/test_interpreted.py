"""The kernels in Triton's interpreter, against loops in float64 and gradients of autograd."""

import os
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from crosslayer.core.depth_attention import operators  # noqa: E402
from crosslayer.core.kernels import depth_attention  # noqa: E402
from crosslayer.testing.tiny import build, config_of  # noqa: E402
from tests.helpers.tiny import tokens  # noqa: E402

EPS = 1e-6
SHAPES = [(1, 1, 8), (257, 3, 8), (2, 129, 8), (5, 33, 1000), (2, 65, 1000), (3, 5, 7186), (1, 16, 7186)]  # T, N, C
# NumPy adds 7,186 numbers in float32 one after another in `attend`: errors of some √7186 · 6e-8 = 5e-6 of the sums'
# size, here of order 1; ten times that. Sums over channels of `differentiate` are of the order √C, so it is relative.
CLOSE = 5e-5
HALF = 2**-11  # of a number rounded to float16


def draw(tokens: int, count: int, width: int, dtype: torch.dtype = torch.float32) -> tuple:
    """Return sources, a direction with scores of order 1, and a gradient."""
    generator = torch.Generator().manual_seed(tokens + count + width)
    sources = [torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(count)]
    direction = torch.randn(width, generator=generator) / width**0.5
    return sources, direction, torch.randn(tokens, width, generator=generator).to(dtype)


def attended(sources, direction, normed=False):
    """The weighted sums, scores and inverses, token by token and source by source in float64."""
    results, scores, inverses = [], [], []
    for rows in zip(*(source.double() for source in sources), strict=True):
        inverse = [1 / (row.square().mean() + EPS).sqrt() for row in rows]
        score = [direction.double() @ row * factor for row, factor in zip(rows, inverse, strict=True)]
        weights = [value.exp() for value in score]
        values = [row * factor for row, factor in zip(rows, inverse, strict=True)] if normed else rows
        results.append(sum(weight * row for weight, row in zip(weights, values, strict=True)) / sum(weights))
        scores.append(torch.stack(score))
        inverses.append(torch.stack(inverse))
    return torch.stack(results), torch.stack(scores, 1), torch.stack(inverses, 1)


def close(actual, expected, tolerance=CLOSE):
    """Whether an error is small beside the largest number, or beside 1."""
    return (actual.double() - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens, count, width", SHAPES)
def test_attend(tokens, count, width, normed):
    sources, direction, _ = draw(tokens, count, width)
    found, oracle = depth_attention.attend(sources, direction, EPS, normed), attended(sources, direction, normed)
    for actual, expected in zip(found, oracle, strict=True):
        assert actual.dtype == torch.float32 and actual.shape == expected.shape
        assert close(actual, expected)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens, count, width", SHAPES)
def test_gradients(tokens, count, width, normed):
    """What `differentiate` and `gradient` make together is what autograd makes."""
    sources, direction, grad = draw(tokens, count, width)
    leaves = [tensor.double().requires_grad_() for tensor in (direction, *sources)]
    attended(leaves[1:], leaves[0], normed)[0].backward(grad.double())
    result, scores, inverse = depth_attention.attend(sources, direction, EPS, normed)
    shares, slopes, shrink, toward = depth_attention.differentiate(grad, scores, inverse, sources, direction, normed)
    weights = scores.double().softmax(0) * (inverse.double() if normed else 1)
    assert close(shares, weights, 1e-6)  # a few roundings of float32
    assert close(toward, leaves[0].grad)
    for number in sorted({0, count // 2, count - 1}):
        terms = [tensor[number : number + 1] for tensor in (shares, slopes)]
        actual = depth_attention.gradient(
            sources[number], [grad], *terms, shrink[number], direction.unsqueeze(0), arrived=None
        )
        assert close(actual, leaves[1 + number].grad)


@pytest.mark.parametrize("with_arrived", [False, True])
@pytest.mark.parametrize("tokens, readers, width", [(33, 1, 8), (257, 2, 8), (2, 129, 8), (5, 6, 1000), (2, 9, 7186)])
def test_gradient_of_several_readers(tokens, readers, width, with_arrived):
    grads, _, source = draw(tokens, readers, width)
    shares, slopes, shrink = torch.rand(readers, tokens), torch.randn(readers, tokens), torch.randn(tokens)
    directions, arrived = torch.randn(readers, width), torch.randn(tokens, width) if with_arrived else None
    expected = shrink.double()[:, None] * source.double()
    for reader, grad in enumerate(grads):
        expected += shares[reader].double()[:, None] * grad.double()
        expected += slopes[reader].double()[:, None] * directions[reader].double()
    if arrived is not None:
        expected += arrived.double()
    actual = depth_attention.gradient(source, grads, shares, slopes, shrink, directions, arrived)
    assert close(actual, expected, 1e-6)  # a few roundings of float32: numbers of order √R, up to 129 of them


def test_sources_of_several_dtypes():
    sources, direction, grad = draw(3, 5, 1000)
    sources = [source.half() if number % 2 else source for number, source in enumerate(sources)]
    result, scores, inverse = depth_attention.attend(sources, direction, EPS)
    assert result.dtype == torch.float32 and close(result, attended(sources, direction)[0])
    shares, slopes, shrink, _ = depth_attention.differentiate(grad, scores, inverse, sources, direction)
    leaves = [source.double().requires_grad_() for source in sources]
    attended(leaves, direction)[0].backward(grad.double())
    for number in (1, 2):
        terms = [tensor[number : number + 1] for tensor in (shares, slopes)]
        actual = depth_attention.gradient(
            sources[number], [grad], *terms, shrink[number], direction.unsqueeze(0), arrived=None
        )
        assert actual.dtype == sources[number].dtype
        assert close(actual, leaves[number].grad, HALF if number == 1 else CLOSE)


def test_a_rounded_result():
    """What rounding does to the result is not seen in gradients, even where sources are alike but for a tenth."""
    sources, direction, grad = draw(3, 5, 1000, torch.float16)
    sources = [(sources[0] + 0.1 * source).half() for source in sources]
    result, scores, inverse = depth_attention.attend(sources, direction, EPS)
    assert result.dtype == torch.float16 and close(result, attended(sources, direction)[0], HALF)
    leaf, *leaves = [tensor.double().requires_grad_() for tensor in (direction, *sources)]
    attended(leaves, leaf)[0].backward(grad.double())
    shares, slopes, _, toward = depth_attention.differentiate(grad, scores, inverse, sources, direction)
    assert close(toward, leaf.grad)
    # softmax's slopes add to 0: 5 numbers of order √C = 30 in float32
    assert ((slopes / inverse).sum(0).abs() <= 1e-5).all() and close(shares.sum(0), torch.ones(3), 1e-6)


def test_too_many_sources():
    with pytest.raises(ValueError, match="take 1.*129 tensors,.*130"):
        depth_attention.attend([torch.ones(1, 8)] * 130, torch.ones(8), EPS)


def test_the_gradient_of_a_direction_has_the_same_bits_twice():
    sources, direction, grad = draw(550, 1, 8)  # more tokens than programs
    saved = depth_attention.attend(sources, direction, EPS)
    first, second = (depth_attention.differentiate(grad, *saved[1:], sources, direction)[3] for _ in range(2))
    assert torch.equal(first, second)
    leaf = direction.double().requires_grad_()
    attended(sources, leaf)[0].backward(grad.double())
    assert close(first, leaf.grad)


@pytest.fixture
def moved(monkeypatch):
    """Returns a call's result and the bytes that it moves by tensor, new ones together; masked ones do not count."""
    counts, spans = Counter(), {}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers, mask):
        addresses = pointers.data[mask.data.astype(bool)]
        if len(addresses):
            first, last = int(addresses.min()), int(addresses.max())
            name = next((name for name, span in spans.items() if first in span), "new")
            assert name == "new" or last in spans[name]
            counts[name] += len(addresses) * pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(self, pointers, mask, *rest):
        count(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        count(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def call(function, *arguments, **named):
        counts.clear()
        for name, tensor in named.items():
            spans[name] = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        result = function(*arguments)
        return result, dict(counts)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
    return call


def test_large_tensors_are_moved_once(moved):
    """Besides scores and the like, and rows that many programs share, so that they come from a cache."""
    sources, direction, grad = draw(8, 17, 1000)  # padded to 32 sources and 1,024 channels, which must not be read
    size = grad.nbytes
    named = {f"source {number}": source for number, source in enumerate(sources)} | {"direction": direction}
    once = dict.fromkeys((name for name in named if name != "direction"), size)
    saved, counts = moved(depth_attention.attend, sources, direction, EPS, **named)
    assert counts.pop("direction") == len(grad) * direction.nbytes
    assert counts == {**once, "new": sum(tensor.nbytes for tensor in saved)}

    named |= {"grad": grad}
    once |= {"grad": size}
    terms, counts = moved(depth_attention.differentiate, grad, *saved[1:], sources, direction, **named)
    extra = counts.pop("new")
    assert counts == once
    assert extra - size == 7 * terms[0].nbytes  # partial sums of 8 programs; scores and inverse twice, three results
    assert sum(counts.values()) + extra <= 1.1 * (sum(once.values()) + 5 * terms[0].nbytes)


def test_gradients_are_moved_once(moved):
    grads, _, source = draw(40, 17, 1000)
    shares, slopes, shrink, directions = (
        torch.randn(17, 40),
        torch.randn(17, 40),
        torch.randn(40),
        torch.randn(17, 1000),
    )
    named = {f"grad {number}": grad for number, grad in enumerate(grads)} | {"source": source, "arrived": grads[0] + 1}
    arguments = source, grads, shares, slopes, shrink, directions, named["arrived"]
    _, counts = moved(depth_attention.gradient, *arguments, **named, directions=directions, small=shrink)
    tiles = -(-len(source) // depth_attention.TOKENS)
    assert counts.pop("directions") == tiles * directions.nbytes  # all from a cache but the first
    small, extra = counts.pop("small"), counts.pop("new")
    assert counts == dict.fromkeys(named, source.nbytes)
    minimum = sum(counts.values()) + source.nbytes + shares.nbytes + slopes.nbytes + shrink.nbytes
    assert sum(counts.values()) + small + extra <= 1.1 * minimum


@pytest.mark.parametrize("method", [{"name": "attnres"}, {"name": "attnres", "block": 5}], ids=str)
def test_models_run_on_the_kernels(method, monkeypatch):
    """As on a GPU: loss and gradients of a model in float32 are those of the plain forms."""
    model, ids = build(config_of([method])).float().train(), tokens(batch=1, length=6)
    results = []
    for on_kernels in (False, True):
        if on_kernels:
            monkeypatch.setattr(operators, "triton_kernels", lambda device: depth_attention)
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        # float32: sums over 13 sources in another order, through 6 layers and back
        assert (one - other).abs().max() <= 1e-4 * other.abs().max() + 1e-7

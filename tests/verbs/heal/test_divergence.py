"""The KL over blocks of tokens: value, gradients and memory, against logits of all tokens at once."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from crosslayer.training.distillation import BLOCK, Head, divergence


def naive(hidden, head, target, target_head):
    y, z = (states @ made.weight.T for states, made in ((hidden, head), (target, target_head)))
    y = y if head.cap is None else torch.tanh(y / head.cap) * head.cap
    z = z if target_head.cap is None else torch.tanh(z / target_head.cap) * target_head.cap
    p, q = z.log_softmax(-1), y.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def states_of(rows, vocabulary, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, 6), (vocabulary, 6), (rows, 4), (vocabulary, 4))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 5) | st.just(BLOCK + 7),
    vocabulary=st.integers(1, 23),
    rows=st.sampled_from([1, 3, 2 * BLOCK]),
    scale=st.sampled_from([0.1, 1.0, 12.0]),
    cap=st.sampled_from([None, 3.0]),
)
def test_value_and_gradients_are_those_of_the_naive_formula(tokens, vocabulary, rows, scale, cap):
    hidden, weight, target, target_weight = states_of(tokens, vocabulary, scale)
    results = []
    for formula in (divergence, naive):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        arguments = (inputs[0], Head(inputs[1], cap), target, Head(target_weight, cap))
        loss = formula(*arguments, rows) if formula is divergence else formula(*arguments)
        (2 * loss).backward()
        results.append((loss.detach(), *(tensor.grad for tensor in inputs)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


def test_a_head_that_is_tied_gets_gradients_of_both_ends():
    _, weight, target, target_weight = states_of(3, 11, 1.0)
    gradients = []
    for formula in (divergence, naive):
        tied = weight.clone().requires_grad_()
        formula(tied[:3] * 2, Head(tied), target, Head(target_weight)).backward()
        gradients.append(tied.grad)
    torch.testing.assert_close(*gradients)


def test_nothing_flows_back_to_the_teacher():
    tensors = [tensor.requires_grad_() for tensor in states_of(3, 11, 1.0)]
    divergence(tensors[0], Head(tensors[1]), tensors[2], Head(tensors[3])).backward()
    assert [tensor.grad is None for tensor in tensors] == [False, False, True, True]


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, target, target_weight = states_of(3, 11, 1.0)
    hidden.requires_grad_()
    divergence(hidden, Head(weight), target, Head(target_weight), 2).backward()
    assert hidden.grad is not None and weight.grad is None


def test_equal_predictions_have_no_divergence_also_under_autocast():
    hidden, weight, _, _ = (tensor.float() for tensor in states_of(4, 50, 1.0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = divergence(hidden.requires_grad_(), Head(weight), hidden, Head(weight), 3)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss.item()) < 1e-5
    assert hidden.grad.abs().max() < 1e-2


def test_autocast_is_near_float32():
    hidden, weight, target, target_weight = (tensor.float() for tensor in states_of(64, 50, 0.5))
    heads = Head(weight), Head(target_weight)
    with torch.autocast("cpu", torch.bfloat16):
        half = divergence(hidden, heads[0], target, heads[1], 16)
    assert half.item() == pytest.approx(divergence(hidden, heads[0], target, heads[1]).item(), rel=0.02)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_logits_of_all_tokens_never_exist():
    """512 tokens and 8,192 entries are 4.2 M logits; no tensor is larger than those of 16 tokens."""
    tokens, vocabulary, rows = 512, 8192, 16
    hidden, weight, target, target_weight = (tensor.float() for tensor in states_of(tokens, vocabulary, 0.3))
    gc.collect()
    with Largest() as largest:
        divergence(hidden.requires_grad_(), Head(weight.requires_grad_()), target, Head(target_weight), rows).backward()
    assert weight.numel() < largest.numbers <= rows * vocabulary

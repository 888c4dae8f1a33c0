"""Attention over depth: softmax-weighted sums of earlier sublayers' outputs, for every token by itself.

    h_r = Σ_i α_ri v_i,  α_ri = softmax_i(s_ri),  s_ri = d_rᵀ v_i / rms(v_i),  d_r = query ∘ gain

Two forms of the same numbers. `listed` is plain autograd, source by source: the oracle, and what a compiler fuses.
The other gathers a few tokens of all sources at a time, so that they stay in the processor's cache. Its backward pass
does not build a gradient per reader and source: a reader leaves with each source what the gradient consists of, and a
source, once all of its readers are through, builds it at once. A source that does not come from `mark` as it is (FSDP2
wraps what enters a layer) gets an ordinary gradient, and so do all where the gradient is to be differentiated again.

Shapes: T tokens of all sequences, N sources, R directions, C hidden.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

GATHERED = 1 << 20  # elements of all sources that are gathered at a time


def mark(source: Tensor) -> Tensor:
    """Return the source as one with which readers may leave their part of its gradient."""
    return _Source.apply(source) if _eager() and torch.is_grad_enabled() and source.requires_grad else source


def depth_attention(sources: Sequence[Tensor], directions: Tensor, eps: float) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return Σ_i α_i v_i over sources (…, C) for R directions (R, C), and the log-sum-exp of the scores.

    R tensors (…, C), and (R, …) in float32 or wider.
    """
    with exact(directions.device):
        if not _eager():
            return listed(sources, directions, eps)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (directions, *sources)):
            *outs, total = _Read.apply(eps, directions, *sources)
            return tuple(outs), total
        outs, scores, _, _ = _attend(sources, directions, eps)
        return outs, _total(scores, sources[0])


def listed(sources: Sequence[Tensor], directions: Tensor, eps: float) -> tuple[tuple[Tensor, ...], Tensor]:
    """Do what `depth_attention` does, source by source, by operators that autograd and compilers know."""
    scores = torch.stack([depth_scores(source, directions, eps) for source in sources])  # (N, R, …)
    shares = scores.softmax(dim=0).to(sources[0].dtype).unsqueeze(-1)  # (N, R, …, 1)
    result = shares[0] * sources[0]  # (R, …, C)
    for share, source in zip(shares[1:], sources[1:], strict=True):
        result = result + share * source
    return result.unbind(), scores.logsumexp(dim=0)


def depth_scores(source: Tensor, directions: Tensor, eps: float) -> Tensor:
    """Return dᵀ v / rms(v) in float32 or wider for directions (R, C) and v (…, C): (R, …)."""
    wide = _wide(source)
    source = source.to(wide)
    return (source @ directions.to(wide).T * inverse_rms(source, eps)).movedim(-1, 0)  # (…, R) → (R, …)


def inverse_rms(source: Tensor, eps: float) -> Tensor:
    """Return 1 / rms(v) of v (…, C): (…, 1)."""
    return torch.rsqrt(source.square().mean(-1, keepdim=True) + eps)


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """Keep autocast from rounding scores."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class _Part(NamedTuple):
    """What one reader adds to the gradient of a source."""

    grads: Sequence[Tensor]  # M of (T, C): of those results that were used
    shares: Tensor  # (T, M), their α
    slopes: Tensor  # (T, R), gradient of the scores, over rms(v)
    directions: Tensor  # (R, C)
    shrink: Tensor  # (T, 1): rms(v) takes this much of the source itself


class _Source(torch.autograd.Function):
    """The identity; its backward pass builds the gradient from the parts that readers left."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(value)
        ctx.parts = {}  # by backward pass, since one that was broken off leaves its parts behind
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = ctx.parts.pop(torch._C._current_graph_task_id(), None)
        if parts is None:
            return grad
        (value,) = ctx.saved_tensors
        return _gradient(value, parts, grad)


class _Read(torch.autograd.Function):
    """R results over N sources, and the log-sum-exp of their scores."""

    @staticmethod
    def forward(ctx: Any, eps: float, directions: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        ctx.nodes = [_marked(source) for source in sources]
        outs, *saved = _attend(sources, directions, eps)
        ctx.save_for_backward(directions, *saved, *sources)
        return (*outs, _total(saved[0], sources[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors  # asked for once, as checkpointing demands
        saved, sources, directions = tensors[:4], tensors[4:], tensors[0]
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx, directions, sources, grads)
        with exact(directions.device):
            parts, toward = _parts(saved, sources, grads)
            results: list[Tensor | None] = []
            for source, part, node, needed in zip(sources, parts, ctx.nodes, ctx.needs_input_grad[2:], strict=True):
                if node is not None:
                    node.parts.setdefault(torch._C._current_graph_task_id(), []).append(part)
                results.append(_gradient(source, [part], None) if needed and node is None else None)
        return None, toward, *results


def _eager() -> bool:
    """Return whether autograd alone looks on: no compiler or export, no `torch.func`, no forward differentiation."""
    forward = torch.autograd.forward_ad._current_level >= 0
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward)


def _marked(source: Tensor) -> Any:
    node = source.grad_fn
    return node if isinstance(node, _Source._backward_cls) else None  # type: ignore[attr-defined]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]


def _gathered(tensors: Sequence[Tensor], dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield all of (T, C) side by side, (t, N, C), for t tokens at a time; each overwrites the one before."""
    tokens, width = tensors[0].shape
    size = max(1, GATHERED // (len(tensors) * width))
    if tokens <= size:
        yield slice(None), torch.stack(tuple(tensors), dim=1).to(dtype)
        return
    scratch = tensors[0].new_empty(size, len(tensors), width, dtype=dtype)
    for number, pieces in enumerate(zip(*(tensor.split(size) for tensor in tensors), strict=True)):
        start, count = number * size, len(pieces[0])
        yield slice(start, start + count), torch.stack(pieces, dim=1, out=scratch[:count])


def _attend(
    sources: Sequence[Tensor], directions: Tensor, eps: float
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
    """Return R results (…, C), scores and shares (T, N, R), and 1 / rms of the sources (T, N, 1)."""
    shape, flat = sources[0].shape, _flat(sources)
    kept = functools.reduce(torch.promote_types, (source.dtype for source in sources))
    wide = torch.promote_types(kept, torch.float32)
    columns = directions.to(wide).T
    outs = [flat[0].new_empty(flat[0].shape, dtype=wide) for _ in directions]
    saved = []
    for where, gathered in _gathered(flat, wide):
        square = torch.linalg.vector_norm(gathered, dim=-1, keepdim=True).square_()  # (t, N, 1)
        inverse = square.div_(shape[-1]).add_(eps).rsqrt_()
        scores = (gathered @ columns).mul_(inverse)  # (t, N, R)
        shares = scores.softmax(dim=1)
        for out, share in zip(outs, shares.unbind(dim=2), strict=True):
            torch.bmm(share.unsqueeze(1), gathered, out=out[where].unsqueeze(1))
        saved.append((scores, shares, inverse))
    scores, shares, inverse = saved[0] if len(saved) == 1 else map(torch.cat, zip(*saved, strict=True))
    return tuple(out.view(shape).to(kept) for out in outs), scores, shares, inverse


def _total(scores: Tensor, source: Tensor) -> Tensor:
    """Return the log-sum-exp over sources, (T, N, R) → (R, …)."""
    return scores.logsumexp(dim=1).T.reshape(-1, *source.shape[:-1])


def _parts(
    saved: Sequence[Tensor], sources: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[list[_Part], Tensor]:
    """Return what a reader adds to the gradient of each source, and the gradient of its directions."""
    directions, scores, shares, inverse = saved  # (R, C), (T, N, R) twice, (T, N, 1)
    used = [number for number in range(len(directions)) if grads[number] is not None]
    flat = _flat([grad for grad in grads[:-1] if grad is not None])  # M of (T, C)
    slopes = torch.zeros_like(shares) if grads[-1] is None else shares * grads[-1].reshape(len(directions), -1).T.unsqueeze(1)
    toward = torch.zeros_like(directions, dtype=shares.dtype)
    for where, gathered in _gathered(_flat(sources), shares.dtype):
        piece = slopes[where]
        for number, grad in zip(used, flat, strict=True):
            share = shares[where, :, number : number + 1]
            change = torch.bmm(gathered, grad[where].to(shares.dtype).unsqueeze(2))  # (t, N, 1)
            piece[:, :, number : number + 1] += share * (change - (share * change).sum(dim=1, keepdim=True))
        toward.addmm_((piece * inverse[where]).flatten(0, 1).T, gathered.flatten(0, 1))
    shrink = (slopes * scores).sum(-1, keepdim=True) * inverse.square() / directions.shape[-1]
    slopes = slopes.mul_(inverse)
    parts = [
        _Part(flat, shares[:, i, used], slopes[:, i], directions.to(shares.dtype), shrink[:, i])
        for i in range(len(sources))
    ]
    return parts, toward.to(directions.dtype)


def _gradient(source: Tensor, parts: Sequence[_Part], grad: Tensor | None) -> Tensor:
    """Return the gradient of a source: what its readers left, and what came by itself."""
    grads = [grad for part in parts for grad in part.grads]
    shares = torch.cat([part.shares for part in parts], dim=1).unsqueeze(1)  # (T, 1, M)
    slopes = torch.cat([part.slopes for part in parts], dim=1)
    directions = torch.cat([part.directions for part in parts])
    shrink = functools.reduce(torch.add, (part.shrink for part in parts))
    (flat,) = _flat([source])
    result = torch.mm(slopes, directions).addcmul_(shrink, flat, value=-1)  # (T, C)
    for where, gathered in _gathered(grads, result.dtype) if grads else ():
        result[where].unsqueeze(1).baddbmm_(shares[where], gathered)
    result = result.to(source.dtype).view(source.shape)
    return result if grad is None else result.add_(grad)


def _differentiable(ctx: Any, directions: Tensor, sources: Sequence[Tensor], grads: Sequence[Any]) -> list[Any]:
    """Return the gradients of directions and sources by operators that can be differentiated again."""
    inputs = [tensor.view_as(tensor) for tensor in (directions, *sources)]  # ends here, though sources need sources
    outs, total = listed(inputs[1:], inputs[0], ctx.eps)
    results = [out for out, grad in zip((*outs, total), grads, strict=True) if grad is not None]
    needed = [tensor for tensor, need in zip(inputs, ctx.needs_input_grad[1:], strict=True) if need]
    arrived = [grad for grad in grads if grad is not None]
    gradients = torch.autograd.grad(results, needed, arrived, create_graph=True, allow_unused=True)
    following = iter(gradients)
    return [next(following) if need else None for need in ctx.needs_input_grad[1:]]

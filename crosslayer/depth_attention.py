"""Attention over depth: softmax-weighted sums of earlier sublayers' outputs, for every token by itself.

    h_r = Σ_i α_ri v_i,  α_ri = softmax_i(s_ri),  s_ri = d_rᵀ v_i / rms(v_i),  d_r = query ∘ gain

Two forms of the same numbers. `listed` is plain autograd, source by source: the oracle, and what a compiler fuses.
The other takes some tokens of all sources at a time, which then stay in the processor's cache, and a source's norm
once. Its backward pass builds no gradient per reader and source: a reader leaves with each source what the gradient
consists of, and a source, once all of its readers are through, builds it at once. A source that does not come from
`mark` as it is (FSDP2 wraps what enters a layer) gets an ordinary gradient from each reader, and so do all sources
where the gradient is to be differentiated again.

Shapes: T tokens of all sequences, N sources, R directions, C hidden.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE = {"cpu": 1 << 18}  # elements of a source that are taken at a time; elsewhere a whole one
GATHERED = 1 << 18  # elements of all sources that are put side by side at the most


def mark(source: Tensor) -> Tensor:
    """Return the source as one with which readers may leave their part of its gradient."""
    return _Source.apply(source) if _eager() and torch.is_grad_enabled() and source.requires_grad else source


def depth_attention(
    sources: Sequence[Tensor], directions: Tensor, eps: float, with_total: bool = True
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return Σ_i α_i v_i over sources (…, C) for R directions (R, C), and the log-sum-exp of the scores.

    R tensors (…, C), and (R, …) in float32 or wider; where it is not needed (`with_total`) it may be None.
    """
    with exact(directions.device):
        if not _eager():
            return listed(sources, directions, eps)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (directions, *sources)):
            *outs, total = _Read.apply(eps, directions, *sources)
            return tuple(outs), total
        if len(sources) * sources[0].numel() <= GATHERED:
            return _side_by_side(sources, directions, eps, with_total)
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


def merge(source: Tensor, result: Tensor, total: Tensor, direction: Tensor, eps: float) -> Tensor:
    """Return what a result (…, C) over other sources, whose scores have the log-sum-exp (…), becomes with one more.

    The `direction` is (1, C).
    """
    with exact(direction.device):
        tensors = (source, result, total, direction)
        if _eager() and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _Merge.apply(eps, *tensors)
        return _merged(*tensors, eps)


def _merged(source: Tensor, result: Tensor, total: Tensor, direction: Tensor, eps: float) -> Tensor:
    share = torch.sigmoid(total - depth_scores(source, direction, eps)[0]).to(result.dtype)
    return torch.lerp(source.to(result.dtype), result, share.unsqueeze(-1))


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
    shrink: Tensor  # (T, 1): this much of the source itself, since its norm divides the scores


class _Source(torch.autograd.Function):
    """The identity; its backward pass builds the gradient from the parts that readers left."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(value)
        ctx.square = _square(value.reshape(-1, value.shape[-1]))
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
        if _watched(grads):
            again = functools.partial(_outs_and_total, eps=ctx.eps)
            return None, *_differentiable(again, (directions, *sources), grads, ctx.needs_input_grad[1:])
        with exact(directions.device):
            parts, toward = _parts(saved, sources, grads)
            results: list[Tensor | None] = []
            for source, part, node, needed in zip(sources, parts, ctx.nodes, ctx.needs_input_grad[2:], strict=True):
                if node is not None:
                    node.parts.setdefault(torch._C._current_graph_task_id(), []).append(part)
                results.append(_gradient(source, [part], None) if needed and node is None else None)
        return None, toward, *results


class _Merge(torch.autograd.Function):
    """`merge`, whose gradients are computed some tokens at a time."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, eps: float, source: Tensor, result: Tensor, total: Tensor, direction: Tensor
    ) -> Tensor:
        (flat,), wide = _flat([source]), _wide(source)
        inverse = _square(flat).div_(flat.shape[-1]).add_(eps).rsqrt_()  # (T, 1)
        score = torch.mm(flat.to(wide), direction.to(wide).T).mul_(inverse)
        share = torch.sigmoid(total.reshape(-1, 1) - score)  # of the result
        ctx.eps = eps
        ctx.save_for_backward(source, result, total, direction, inverse, score, share)
        weight = share.to(result.dtype).view(*source.shape[:-1], 1)
        return torch.lerp(source.to(result.dtype), result, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, inverse, score, share = ctx.saved_tensors
        if _watched([grad]):
            again = functools.partial(_merged_alone, eps=ctx.eps)
            return None, *_differentiable(again, inputs, [grad], ctx.needs_input_grad[1:])
        source, result, total, direction = inputs
        with exact(grad.device):
            wide = share.dtype
            value, other, arrived = _flat([source, result, grad])
            change = torch.empty_like(share)
            size = _tokens(value)
            pieces = (tensor.split(size) for tensor in (change, value, other, arrived))
            for part, one, two, three in zip(*pieces, strict=True):
                torch.sum((two.to(wide) - one).mul_(three), dim=-1, keepdim=True, out=part)
            slope = change * share * (1 - share)  # of the total; the score's is its negative
            pull = slope * score * inverse.square() / value.shape[-1]
            slopes = -slope * inverse
            toward = torch.mm(slopes, direction.to(wide))
            _add_weighted(toward, [arrived, value], [1 - share, pull])
            of_result = (arrived * share).to(result.dtype).view(result.shape)
            of_direction = (slopes.T @ value.to(wide)).to(direction.dtype)
        of_source = toward.to(source.dtype).view(source.shape)
        return None, of_source, of_result, slope.view(total.shape).to(total.dtype), of_direction


def _eager() -> bool:
    """Return whether autograd alone looks on: no compiler or export, no `torch.func`, no forward differentiation."""
    forward = torch.autograd.forward_ad._current_level >= 0
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward)


def _watched(grads: Sequence[Tensor | None]) -> bool:
    """Return whether a backward pass is to be differentiated again, or goes over several gradients at once."""
    batched = (grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)  # pyright: ignore[reportAttributeAccessIssue]
    return torch.is_grad_enabled() or not _eager() or any(batched)


def _marked(source: Tensor) -> Any:
    node = source.grad_fn
    return node if isinstance(node, _Source._backward_cls) else None  # type: ignore[attr-defined]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]


def _square(flat: Tensor) -> Tensor:
    """Return the squared norms of (T, C): (T, 1)."""
    return torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=_wide(flat)).square_()


def _side_by_side(
    sources: Sequence[Tensor], directions: Tensor, eps: float, with_total: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Do what `depth_attention` does by few operators: for a few tokens, where calling them is what costs."""
    shape, stacked = sources[0].shape, torch.stack(tuple(sources), dim=-2)
    wide = stacked.view(-1, len(sources), shape[-1]).to(_wide(stacked))  # (T, N, C)
    scores = torch.matmul(wide, directions.to(wide.dtype).T).mul_(inverse_rms(wide, eps))  # (T, N, R)
    outs = torch.bmm(scores.softmax(dim=1).mT, wide).to(stacked.dtype)  # (T, R, C)
    total = scores.logsumexp(dim=1).T.reshape(-1, *shape[:-1]) if with_total else None
    return tuple(out.view(shape) for out in outs.unbind(1)), total


def _attend(
    sources: Sequence[Tensor], directions: Tensor, eps: float
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
    """Return R results (…, C), scores and shares (N, T, R), and 1 / rms of the sources (N, T, 1)."""
    shape, flat = sources[0].shape, _flat(sources)
    kept = functools.reduce(torch.promote_types, (source.dtype for source in sources))
    wide = torch.promote_types(kept, torch.float32)
    nodes = [_marked(source) for source in sources]
    squares = [_square(v) if node is None else node.square for v, node in zip(flat, nodes, strict=True)]
    inverse = torch.stack(squares).to(wide).div_(shape[-1]).add_(eps).rsqrt_()
    columns = directions.to(wide).T
    scores = torch.stack([torch.mm(v.to(wide), columns) for v in flat]).mul_(inverse)
    shares = scores.softmax(dim=0)
    outs = []
    for share in shares.unbind(dim=2):  # (N, T)
        first, *others = share.unsqueeze(2).unbind()
        out = flat[0] * first
        _add_weighted(out, flat[1:], others)
        outs.append(out.view(shape).to(kept))
    return tuple(outs), scores, shares, inverse


def _add_weighted(result: Tensor, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Add Σ_i w_i v_i to the result (T, C), for v_i (T, C) and w_i (T, 1), some tokens at a time."""
    size = _tokens(result)
    columns = [zip(v.split(size), w.split(size), strict=True) for v, w in zip(tensors, weights, strict=True)]
    for piece, *terms in zip(result.split(size), *columns, strict=True):
        for value, weight in terms:
            piece.addcmul_(value, weight)


def _products(tensors: Sequence[Tensor], by: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the products of N tensors and M others, all (T, C), token by token: (N, T, M)."""
    tokens, width = tensors[0].shape
    size = max(1, _tokens(tensors[0]) * 2 // len(tensors))
    result = tensors[0].new_empty(tokens, len(by), len(tensors), dtype=dtype)
    scratch = result.new_empty(size, len(tensors), width)  # fresh memory would cost more than the products
    columns = zip(*(v.split(size) for v in tensors), strict=True)
    others = zip(*(g.split(size) for g in by), strict=True)
    for piece, values, grads in zip(result.split(size), columns, others, strict=True):
        gathered = torch.stack(values, dim=1, out=scratch[: len(values[0])])  # (t, N, C)
        for number, grad in enumerate(grads):
            product = torch.bmm(grad.to(dtype).unsqueeze(1), gathered.mT)  # (t, 1, N)
            piece[:, number] = product[:, 0]
    return result.permute(2, 0, 1)


def _tokens(tensor: Tensor) -> int:
    """Return how many tokens are taken at a time."""
    return max(1, PIECE.get(tensor.device.type, tensor.numel()) // tensor.shape[-1])


def _total(scores: Tensor, source: Tensor) -> Tensor:
    """Return the log-sum-exp over sources, (N, T, R) → (R, …)."""
    return scores.logsumexp(dim=0).T.reshape(-1, *source.shape[:-1])


def _parts(
    saved: Sequence[Tensor], sources: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[list[_Part], Tensor]:
    """Return what a reader adds to the gradient of each source, and the gradient of its directions."""
    directions, scores, shares, inverse = saved  # (R, C), (N, T, R) twice, (N, T, 1)
    used = [number for number in range(len(directions)) if grads[number] is not None]
    arrived, flat = _flat([grad for grad in grads[:-1] if grad is not None]), _flat(sources)
    slopes = torch.zeros_like(shares)
    if used:
        weighted = shares[:, :, used] * _products(flat, arrived, shares.dtype)
        slopes[:, :, used] = weighted - shares[:, :, used] * weighted.sum(dim=0)
    if grads[-1] is not None:
        slopes += shares * grads[-1].reshape(len(directions), -1).T
    shrink = (slopes * scores).sum(-1, keepdim=True) * inverse.square() / -directions.shape[-1]
    slopes = slopes.mul_(inverse)
    toward = functools.reduce(torch.add, (slope.T @ v.to(slope.dtype) for slope, v in zip(slopes, flat, strict=True)))
    wide = directions.to(shares.dtype)
    parts = [
        _Part(arrived, share[:, used], slope, wide, own)
        for share, slope, own in zip(shares, slopes, shrink, strict=True)
    ]
    return parts, toward.to(directions.dtype)


def _gradient(source: Tensor, parts: Sequence[_Part], grad: Tensor | None) -> Tensor:
    """Return the gradient of a source: what its readers left, and what came by itself."""
    slopes = torch.cat([part.slopes for part in parts], dim=1)
    result = torch.mm(slopes, torch.cat([part.directions for part in parts]))  # (T, C)
    shrink = functools.reduce(torch.add, (part.shrink for part in parts))
    tensors = [*_flat([source]), *(grad for part in parts for grad in part.grads)]
    weights = [shrink, *(share for part in parts for share in part.shares.split(1, dim=1))]
    _add_weighted(result, tensors, weights)
    result = result.to(source.dtype).view(source.shape)
    return result if grad is None else result.add_(grad)


def _outs_and_total(directions: Tensor, *sources: Tensor, eps: float) -> tuple[Tensor, ...]:
    outs, total = listed(sources, directions, eps)
    return (*outs, total)


def _merged_alone(*inputs: Tensor, eps: float) -> tuple[Tensor]:
    source, result, total, direction = inputs
    return (_merged(source, result, total, direction, eps),)


def _differentiable(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of inputs by operators that autograd and `torch.func` know."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), exact(inputs[0].device):
        inputs = [tensor.view_as(tensor) for tensor in inputs]  # ends here, though sources are made of sources
        outputs = function(*inputs)
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    results, arrived = [output for output, _ in pairs], [grad for _, grad in pairs]
    gradients = iter(torch.autograd.grad(results, wanted, arrived, create_graph=again, allow_unused=True))
    return [next(gradients) if need else None for need in needed]

"""Attention over depth: a softmax-weighted sum of earlier sublayers' outputs, for every token by itself.

    h = Σ_i α_i v_i,  α_i = softmax_i(s_i),  s_i = dᵀ v_i / rms(v_i),  d = query ∘ gain

There are three implementations of the same sum. `listed` is plain autograd, source by source: the reference, and the
form that compilers fuse. Without gradients and for few tokens the sources are stacked, since operator calls dominate
the cost there.

In training, `keep` stores sources contiguously in memory (a bank), so that a reader takes several as one operand. A
reader does not build a gradient for each of its sources either: it records the terms of the gradient with the source,
which sums them once all of its readers are done. Both are optimisations with a fallback: a source that did not pass
through `keep` unchanged (FSDP2 wraps what enters a layer) is an operand by itself and gets an ordinary gradient from
each reader; under hooks on saved tensors (checkpointing, offloading) and under dispatch modes there are no banks; for
double backward everything runs as `listed`.

Shapes: T tokens of all sequences, N sources, C hidden.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

PIECE = 1 << 18  # elements of a source that are processed at a time, to fit a processor's cache
SLOTS = 8  # sources in a bank, whose memory is freed as a whole
ALONE = 3  # sources stored separately before a bank is made: by then they are known to pass layers unchanged
STACKED = 1 << 18  # largest number of elements of all sources together that are stacked


def keep(source: Tensor, earlier: Sequence[Tensor], total: int) -> Tensor:
    """Return a source (…, C) that readers can take together with the earlier ones.

    It may be a copy. The gradients of its readers arrive at `source`, not at the returned tensor.

    Args:
        source: the output of a sublayer, or the embedding.
        earlier: the sources before it.
        total: the largest number of sources that there will be.

    """
    if not (_eager() and torch.is_grad_enabled() and source.requires_grad):
        return source
    return _Source.apply(source, earlier, total)


def depth_attention(sources: Sequence[Tensor], direction: Tensor, eps: float) -> Tensor:
    """Return Σ_i α_i v_i (…, C) over sources (…, C) for a direction (C,)."""
    with exact(direction.device):
        if not _eager():
            return listed(sources, direction, eps)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (direction, *sources)):
            return _Read.apply(eps, direction, *sources)
        if len(sources) * sources[0].numel() <= STACKED:
            return _stacked(sources, direction, eps)
        return _attend(sources, [None] * len(sources), direction, eps)[0]


def listed(sources: Sequence[Tensor], direction: Tensor, eps: float) -> Tensor:
    """Compute `depth_attention` source by source, with operators that autograd and compilers know."""
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
    return source.to(_wide(source.dtype))


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """Keep autocast from rounding scores."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _stacked(sources: Sequence[Tensor], direction: Tensor, eps: float) -> Tensor:
    """Compute `depth_attention` with few operators, without support for gradients."""
    stacked = torch.stack(tuple(sources), dim=-2)  # (…, N, C)
    widened = wide(stacked)
    scores = torch.matmul(widened, direction.to(widened.dtype))  # (…, N)
    inverse = torch.linalg.vector_norm(widened, dim=-1).square_().div_(len(direction)).add_(eps).rsqrt_()
    shares = scores.mul_(inverse).softmax(-1)
    return torch.matmul(shares.unsqueeze(-2), widened).squeeze(-2).to(stacked.dtype)


class _Bank:
    """Contiguous memory for sources of equal shape, dtype and device."""

    def __init__(self, capacity: int, source: Tensor):
        self.values = source.new_empty(capacity, *source.shape)  # (N, …, C)
        self.count = 0

    def add(self, source: Tensor) -> int:
        """Append a copy of a source and return its index."""
        self.values[self.count].copy_(source)
        self.count += 1
        return self.count - 1


class _Term(NamedTuple):
    """The term that one reader adds to the gradient of a source."""

    grad: Tensor  # (T, C), of the reader's result
    share: Tensor  # (T,), α
    slope: Tensor  # (T,), gradient of the score, over rms(v)
    direction: Tensor  # (C,)
    shrink: Tensor  # (T,), the multiple of the source itself, since its norm divides the score


class _Source(torch.autograd.Function):
    """The identity; its backward pass sums the gradient terms that readers recorded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, earlier: Sequence[Tensor], total: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.square = _square(value)  # (T,)
        ctx.terms = {}  # by backward pass, since an interrupted one leaves its terms behind
        ctx.bank, ctx.index = _store(value, earlier, total)
        # an alias with its own version counter: sources appended later do not change it
        result = value.view_as(value) if ctx.bank is None else ctx.bank.values.data[ctx.index]
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        terms = ctx.terms.pop(torch._C._current_graph_task_id(), None)
        if terms is not None:
            (value,) = ctx.saved_tensors
            with exact(value.device):
                grad = _gradient(value, terms, grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
            ctx.bank = None  # freed together with saved tensors, even if the loss is kept
        return grad, None, None


def _store(value: Tensor, earlier: Sequence[Tensor], total: int) -> tuple[_Bank | None, int]:
    """Copy a source into a bank; return the bank and the index, or no bank."""
    nodes = [_kept(source) for source in earlier]
    newest = nodes[-1] if nodes else None
    if newest is None or not _alike(value, earlier[-1]) or _intercepted():
        return None, 0
    bank, left = newest.bank, total - len(earlier)
    if bank is None:
        bank = _begin(earlier, nodes, left)
    elif newest.index + 1 == len(bank.values):
        bank = _Bank(min(SLOTS, left), value)
    elif newest.index + 1 < bank.count:
        bank = None  # the next index is taken: this source is recomputed, or begins a branch
    return bank, 0 if bank is None else bank.add(value)


def _begin(earlier: Sequence[Tensor], nodes: Sequence[Any], left: int) -> _Bank | None:
    """Return a bank with the newest sources and space for more; None unless there are exactly `ALONE` of them."""
    first = len(earlier)
    while first > 0 and nodes[first - 1] is not None and nodes[first - 1].bank is None:
        if not _alike(earlier[first - 1], earlier[-1]):
            break
        first -= 1
    if len(earlier) - first != ALONE or left < 1:
        return None
    bank = _Bank(min(SLOTS, ALONE + left), earlier[-1])
    for source, node in zip(earlier[first:], nodes[first:], strict=True):
        node.bank, node.index = bank, bank.add(source)
    return bank


def _alike(source: Tensor, other: Tensor) -> bool:
    return (source.shape, source.dtype, source.device) == (other.shape, other.dtype, other.device)


def _intercepted() -> bool:
    """Return whether hooks on saved tensors or a dispatch mode are active."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None or _get_current_dispatch_mode() is not None


class _Read(torch.autograd.Function):
    """The weighted sum over N sources."""

    @staticmethod
    def forward(ctx: Any, eps: float, direction: Tensor, *sources: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.eps = eps
        ctx.nodes = [_kept(source) for source in sources]
        result, *saved = _attend(sources, ctx.nodes, direction, eps)
        ctx.save_for_backward(direction, *saved, *sources)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        direction, scores, shares, inverse, *sources = ctx.saved_tensors  # read once, as checkpointing requires
        if _watched(grad):
            return None, *_differentiable((direction, *sources), ctx.eps, grad, ctx.needs_input_grad[1:])
        with exact(direction.device):
            operands = _operands(sources, [_kept(source) for source in sources])  # recomputed sources have other nodes
            arrived = grad.reshape(-1, grad.shape[-1])  # (T, C)
            weighted = shares * _products(operands, arrived.to(shares.dtype))  # (N, T)
            slopes = weighted - shares * weighted.sum(dim=0)  # of the scores
            shrink = (slopes * scores).mul_(inverse.square()).div_(-len(direction))
            slopes = slopes.mul_(inverse)
            toward = _toward(operands, slopes)
            widened, task = direction.to(shares.dtype), torch._C._current_graph_task_id()
            results: list[Tensor | None] = []
            for number, (source, node) in enumerate(zip(sources, ctx.nodes, strict=True)):
                term = _Term(arrived, shares[number], slopes[number], widened, shrink[number])
                if node is not None and torch._C._will_engine_execute_node(node):
                    node.terms.setdefault(task, []).append(term)
                needed = ctx.needs_input_grad[2 + number] and node is None
                results.append(_gradient(source, [term], None) if needed else None)
        return None, toward.to(direction.dtype), *results


def _eager() -> bool:
    """Return whether only autograd is active: no compiler or export, no `torch.func`, no forward-mode gradient."""
    forward = torch.autograd.forward_ad._current_level >= 0
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward)


def _watched(grad: Tensor) -> bool:
    """Return whether a backward pass is differentiated itself, or batched over several gradients."""
    batched = torch._C._functorch.is_legacy_batchedtensor(grad)  # pyright: ignore[reportAttributeAccessIssue]
    return torch.is_grad_enabled() or not _eager() or batched


def _kept(source: Tensor) -> Any:
    """Return the autograd node of a source that `keep` returned, None for other tensors."""
    node = source.grad_fn
    return node if isinstance(node, _Source._backward_cls) else None  # type: ignore[attr-defined]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _square(source: Tensor) -> Tensor:
    """Return the squared norms of (…, C): (T,)."""
    return torch.linalg.vector_norm(source, dim=-1, dtype=_wide(source.dtype)).square_().flatten()


def _attend(
    sources: Sequence[Tensor], nodes: Sequence[Any], direction: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weighted sum (…, C), and scores, shares and 1 / rms of the sources, (N, T) each."""
    kept = functools.reduce(torch.promote_types, (source.dtype for source in sources))
    dtype = _wide(kept)
    operands = _operands(sources, nodes)
    squares = [_square(v) if node is None else node.square for v, node in zip(sources, nodes, strict=True)]
    inverse = torch.stack(squares).to(dtype).div_(len(direction)).add_(eps).rsqrt_()
    columns = direction.to(dtype)
    scores = torch.cat([torch.mv(v.to(dtype).flatten(0, 1), columns) for v in operands])  # (N · T)
    scores = scores.view(inverse.shape).mul_(inverse)
    shares = scores.softmax(dim=0)
    return _weighted(operands, shares.to(kept)).view(sources[0].shape), scores, shares, inverse


def _operands(sources: Sequence[Tensor], nodes: Sequence[Any]) -> list[Tensor]:
    """Return the sources in order as few operands (n, T, C): neighbours in a bank form one operand."""
    operands, start = [], 0
    while start < len(sources):
        end = start + 1
        while end < len(sources) and _adjacent(nodes[end - 1], nodes[end]):
            end += 1
        if end == start + 1:
            operands.append(sources[start].reshape(1, -1, sources[start].shape[-1]))
        else:
            index = nodes[start].index
            operands.append(nodes[start].bank.values[index : index + end - start].flatten(1, -2))
        start = end
    return operands


def _adjacent(node: Any, following: Any) -> bool:
    if node is None or following is None or node.bank is None:
        return False
    return following.bank is node.bank and following.index == node.index + 1


def _weighted(operands: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return Σ_i w_i v_i (T, C) of operands (n, T, C) and weights (N, T), in the weights' type."""
    result, alone = None, []
    for values, rows in zip(operands, weights.split([len(v) for v in operands]), strict=True):
        if len(values) == 1:
            alone.append((values[0], rows[0]))
            continue
        columns = rows.T.contiguous().unsqueeze(1)  # (T, 1, n); non-contiguous, they would make it five times slower
        across = values.to(weights.dtype).transpose(0, 1)  # (T, n, C)
        result = torch.bmm(columns, across) if result is None else result.baddbmm_(columns, across)
    result = None if result is None else result.squeeze(1)
    if result is None:
        values, row = alone.pop()
        result = values * row.unsqueeze(1)
    _add_weighted(result, [values for values, _ in alone], [row for _, row in alone])
    return result


def _products(operands: Sequence[Tensor], grad: Tensor) -> Tensor:
    """Return the products of operands (n, T, C) and a gradient (T, C), token by token: (N, T), in its type."""
    products = []
    for values in operands:
        if len(values) == 1:
            products.append((values[0] * grad).sum(-1).unsqueeze(0))
        else:
            across = values.to(grad.dtype).permute(1, 2, 0)  # (T, C, n)
            products.append(torch.bmm(grad.unsqueeze(1), across).squeeze(1).T)
    return torch.cat(products)


def _toward(operands: Sequence[Tensor], slopes: Tensor) -> Tensor:
    """Return the gradient of the direction (C,) for slopes (N, T) over operands (n, T, C)."""
    result = slopes.new_zeros(operands[0].shape[-1])
    for values, rows in zip(operands, slopes.split([len(v) for v in operands]), strict=True):
        result.addmv_(values.to(slopes.dtype).flatten(0, 1).T, rows.flatten())
    return result


def _gradient(source: Tensor, terms: Sequence[_Term], grad: Tensor | None) -> Tensor:
    """Return the gradient of a source: the sum of its readers' terms and `grad`, which autograd delivered."""
    slopes = torch.stack([term.slope for term in terms], dim=1)  # (T, R)
    result = torch.mm(slopes, torch.stack([term.direction for term in terms]))  # (T, C)
    shrink = functools.reduce(torch.add, (term.shrink for term in terms))
    tensors = [source.reshape(result.shape), *(term.grad for term in terms)]
    _add_weighted(result, tensors, [shrink, *(term.share for term in terms)])
    result = result.to(source.dtype).view(source.shape)
    return result if grad is None else result.add_(grad)


def _add_weighted(result: Tensor, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Add Σ_i w_i v_i to the result (T, C), for v_i (T, C) and w_i (T,)."""
    if not tensors:
        return
    if result.device.type != "cpu":  # few operators
        columns = torch.stack(tuple(weights), dim=1).unsqueeze(1)  # (T, 1, N)
        result += torch.bmm(columns, torch.stack(tuple(tensors), dim=1).to(columns.dtype)).squeeze(1)
        return
    size = max(1, PIECE // result.shape[-1])  # tokens
    columns = (weight.unsqueeze(1) for weight in weights)
    terms = [zip(v.split(size), w.split(size), strict=True) for v, w in zip(tensors, columns, strict=True)]
    for piece, *pairs in zip(result.split(size), *terms, strict=True):
        for value, weight in pairs:
            piece.addcmul_(value, weight)


def _differentiable(inputs: Sequence[Tensor], eps: float, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of inputs (direction, *sources) by operators that autograd and `torch.func` know."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), exact(inputs[0].device):
        inputs = [tensor.view_as(tensor) for tensor in inputs]  # stop here, although sources depend on sources
        output = listed(inputs[1:], inputs[0], eps)
    required = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(output, required, grad, create_graph=again, allow_unused=True))
    return [next(gradients) if need else None for need in needed]

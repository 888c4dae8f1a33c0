"""Attention over depth as an operator of torch, `crosslayer::depth_attention`, and how its gradients are built.

A reader does not build a gradient for each of its sources: it records the terms of the gradient with the source, which
`keep` made a node of autograd's graph, and which sums them once all of its readers are done. A pair then costs
one pass over the source and one over the reader's gradient. It is the same when a model is compiled: terms are recorded
as the backward pass is traced. Tensors that did not pass through `keep` get a gradient from each reader.

Double backward and `torch.func` go through the definition.

Shapes: T tokens of all sequences, N sources, C hidden.
"""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from crosslayer.core.depth_attention.definition import exact, is_transformed, listed, wide_type
from crosslayer.core.depth_attention.plain import attend, differentiate, source_gradient
from crosslayer.core.sources import Sources

MOST_TERMS = 8  # that wait with a source at least, since each sum of them reads and writes the gradient once more
SLOTS = 8  # sources in a bank, whose memory is freed as a whole

_LIBRARY = torch.library.Library("crosslayer", "FRAGMENT")
_LIBRARY.define("depth_attention(Tensor[] sources, Tensor direction, float eps) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "depth_attention_backward(Tensor grad, Tensor scores, Tensor inverse, Tensor[] sources, Tensor direction) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "depth_attention_source_gradient(Tensor source, Tensor[] grads, Tensor[] shares, Tensor[] slopes, "
    "Tensor[] shrinks, Tensor[] directions, Tensor? arrived) -> Tensor"
)
_OPERATORS = torch.ops.crosslayer


def depth_attention(sources: Sequence[Tensor], direction: Tensor, eps: float) -> Tensor:
    """Return Σ_i α_i v_i (…, C) over sources (…, C) for a direction (C,)."""
    sources = list(sources)
    if is_transformed():
        with exact(direction.device):
            return listed(sources, direction, eps)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return _OPERATORS.depth_attention(sources, direction, eps)[0]
    run = _attend if _has_kernels(len(sources), *sources) else attend
    return run(sources, direction, eps)[0]  # the dispatcher would take a tenth of a decoding step's read


def keep(source: Tensor, earlier: Sources, total: int) -> Sources:
    """Return the earlier sources and one (…, C) more, whose gradient is built once for all of its readers.

    In training on a CPU it is copied to memory behind the earlier ones, which readers take as one operand.

    Args:
        source: the output of a sublayer, or the embedding.
        earlier: the sources before it.
        total: the largest number of sources that there will be.

    """
    if is_transformed() or not (torch.is_grad_enabled() and source.requires_grad):
        return earlier.with_newest(source)
    if torch.compiler.is_compiling():
        return earlier.with_newest(_as_source(source))
    bank = None if source.device.type != "cpu" or _is_intercepted() else _bank(source, earlier, total)
    return Sources((*earlier, _Source.apply(source, bank)), bank or earlier.bank)


class _Bank:
    """Memory for sources of equal shape, type and device, one behind another.

    Attributes:
        values: (n, …, C), the memory.
        next: the number of the next source, the first of all being 0.
        end: the number of the first source that it has no space for.

    """

    def __init__(self, source: Tensor, number: int, capacity: int):
        self.values = source.new_empty(capacity, *source.shape)
        self.next, self.end = number, number + capacity

    def takes(self, source: Tensor, number: int) -> bool:
        """Return whether a source comes next, and fits."""
        alike = (source.shape, source.dtype) == (self.values.shape[1:], self.values.dtype)
        return alike and number == self.next < self.end

    def add(self, source: Tensor) -> Tensor:
        """Copy a source; return an alias with its own version counter, which later sources do not change."""
        index = self.next - self.end  # from the end
        self.values[index].copy_(source)
        self.next += 1
        return self.values.data[index]


def _bank(source: Tensor, earlier: Sources, total: int) -> _Bank | None:
    """Return the bank for a source, perhaps a new one; None if it is recomputed or begins a branch."""
    bank, number = earlier.bank, len(earlier)
    if bank is not None and bank.takes(source, number):
        return bank
    if total - number < 2 or (bank is not None and number < bank.next):
        return None
    return _Bank(source, number, min(SLOTS, total - number))


class _Term(NamedTuple):
    """The term that one reader adds to the gradient of a source."""

    grad: Tensor  # (…, C), of the reader's result
    share: Tensor  # (T,), α
    slope: Tensor  # (T,), gradient of the score, over rms(v)
    shrink: Tensor  # (T,), the multiple of the source itself, since its norm divides the score
    direction: Tensor  # (C,)


class _Terms:
    """The gradient of a source in one backward pass: terms of readers, and the sum of earlier ones."""

    def __init__(self) -> None:
        self.terms: list[_Term] = []
        self.sum: Tensor | None = None

    def record(self, source: Tensor, term: _Term, most: int) -> None:
        """Record a term; sum them up once there are `most`, so that the readers' gradients can be freed."""
        self.terms.append(term)
        if len(self.terms) >= most:
            self.sum, self.terms = _gradient(source, self.terms, self.sum), []

    def total(self, source: Tensor, arrived: Tensor | None) -> Tensor:
        """Return the sum of everything, and of what arrived from elsewhere."""
        if self.sum is not None:
            arrived = self.sum if arrived is None else arrived + self.sum
        return _gradient(source, self.terms, arrived) if self.terms else arrived


class _Source(torch.autograd.Function):
    """The identity; its backward pass sums the gradient terms that readers recorded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, bank: _Bank | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.terms = {}  # by backward pass, since an interrupted one leaves its terms behind
        result = value.view_as(value) if bank is None else bank.add(value)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        terms = ctx.terms.pop(torch._C._current_graph_task_id(), None)
        return grad if terms is None else terms.total(ctx.saved_tensors[0], grad), None


@torch.compiler.allow_in_graph
def _as_source(value: Tensor) -> Tensor:
    return _Source.apply(value, None)


def _gradient(source: Tensor, terms: Sequence[_Term], arrived: Tensor | None) -> Tensor:
    grads, shares, slopes, shrinks, directions = map(list, zip(*terms, strict=True))
    return _OPERATORS.depth_attention_source_gradient(
        source, grads, shares, slopes, shrinks, directions, arrived
    )  # (…, C)


def _remember(ctx: Any, inputs: tuple[list[Tensor], Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
    sources, direction, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.nodes = [_node(source) for source in sources]
    ctx.save_for_backward(direction, *output[1:], *sources)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[list[Tensor | None] | None, Tensor | None, None]:
    if grad is None:
        return None, None, None
    direction, scores, inverse, *sources = ctx.saved_tensors  # read once, as checkpointing requires
    needs_sources, needs_direction, _ = ctx.needs_input_grad
    if torch.is_grad_enabled() or is_transformed() or _is_batched(grad):
        gradients = _differentiable((*sources, direction), ctx.eps, grad, [*needs_sources, needs_direction])
        return gradients[:-1], gradients[-1], None
    shares, slopes, shrinks, toward = _OPERATORS.depth_attention_backward(grad, scores, inverse, sources, direction)
    task, gradients = torch._C._current_graph_task_id(), []
    for number, (source, node) in enumerate(zip(sources, ctx.nodes, strict=True)):
        term = _Term(grad, shares[number], slopes[number], shrinks[number], direction)
        if node is not None and torch._C._will_engine_execute_node(node):
            # a sum for each source takes less memory than a gradient of as many readers
            node.terms.setdefault(task, _Terms()).record(source, term, most=max(MOST_TERMS, len(sources)))
        needed = needs_sources[number] and node is None
        gradients.append(_gradient(source, [term], None) if needed else None)
    return gradients, toward.to(direction.dtype), None


def _differentiable(inputs: Sequence[Tensor], eps: float, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of inputs (*sources, direction) by operators that autograd and `torch.func` know."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), exact(grad.device):
        inputs = [tensor.view_as(tensor) for tensor in inputs]  # stop here, although sources depend on sources
        output = listed(inputs[:-1], inputs[-1], eps)
    required = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(output, required, grad, create_graph=again, allow_unused=True))
    return [next(gradients) if need else None for need in needed]


def _node(source: Tensor) -> Any:
    """Return the autograd node of a source that `keep` made, None for other tensors."""
    node = source.grad_fn
    return node if isinstance(node, _Source._backward_cls) else None  # type: ignore[attr-defined]


def _is_batched(grad: Tensor) -> bool:
    """Return whether a backward pass is of several gradients at once."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)  # pyright: ignore[reportAttributeAccessIssue]


def _is_intercepted() -> bool:
    """Return whether hooks on saved tensors or a dispatch mode are active.

    Checkpointing and offloading must be able to free sources one by one, and dispatch modes must see them.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None or _get_current_dispatch_mode() is not None


@functools.cache
def _triton_kernels() -> Any:
    """Return the module of kernels for GPUs, None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from crosslayer.core.kernels import depth_attention as kernels

    return kernels


def _has_kernels(count: int, *tensors: Tensor) -> bool:
    """Return whether Triton's kernels can take so many sources or readers, and these tensors."""
    if tensors[0].device.type != "cuda" or _triton_kernels() is None:
        return False
    return count <= _triton_kernels().SIZES[-1] and all(tensor.dtype != torch.float64 for tensor in tensors)


def _rows(tensor: Tensor) -> Tensor:
    """Return (…, C) as (T, C), contiguous, as the kernels for GPUs need it."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _attend(sources: list[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not _has_kernels(len(sources), *sources):
        result, scores, inverse = attend(sources, direction, eps)
        return result, scores.contiguous(), inverse.contiguous()
    result, scores, inverse = _triton_kernels().attend([_rows(source) for source in sources], direction, eps)
    return result.view(sources[0].shape), scores, inverse


def _differentiate(
    grad: Tensor, scores: Tensor, inverse: Tensor, sources: list[Tensor], direction: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _has_kernels(len(sources), grad, *sources):
        return differentiate(grad, scores, inverse, sources, direction)
    rows = [_rows(source) for source in sources]
    return _triton_kernels().differentiate(_rows(grad), scores, inverse, rows, direction)


def _source_gradient(
    source: Tensor,
    grads: list[Tensor],
    shares: list[Tensor],
    slopes: list[Tensor],
    shrinks: list[Tensor],
    directions: list[Tensor],
    arrived: Tensor | None,
) -> Tensor:
    if not _has_kernels(len(grads), source, *grads):
        return source_gradient(source, grads, shares, slopes, shrinks, directions, arrived)
    gradient = _triton_kernels().gradient(
        _rows(source),
        [_rows(grad) for grad in grads],
        torch.stack(shares),  # (R, T)
        torch.stack(slopes),  # (R, T)
        torch.stack(shrinks).sum(dim=0),  # (T,)
        torch.stack(directions).float(),  # (R, C)
        None if arrived is None else _rows(arrived),
    )
    return gradient.view(source.shape)


def _fake_attend(sources: list[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    kept = functools.reduce(torch.promote_types, (source.dtype for source in sources))
    rows = direction.new_empty(len(sources), sources[0].numel() // len(direction), dtype=wide_type(kept))  # (N, T)
    return sources[0].new_empty(sources[0].shape, dtype=kept), rows, torch.empty_like(rows)


def _fake_differentiate(
    grad: Tensor, scores: Tensor, inverse: Tensor, sources: list[Tensor], direction: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shares, slopes, shrinks = (torch.empty_like(scores) for _ in range(3))
    return shares, slopes, shrinks, scores.new_empty(direction.shape)


def _flops(sources: list[Any], *_: Any, **__: Any) -> int:
    """Return the operations of a read: two products with each source."""
    return 4 * sum(shape.numel() for shape in sources)


for name, kernel, fake in (
    ("depth_attention", _attend, _fake_attend),
    ("depth_attention_backward", _differentiate, _fake_differentiate),
    ("depth_attention_source_gradient", _source_gradient, lambda source, *_: torch.empty_like(source)),
):
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"crosslayer::{name}", fake, lib=_LIBRARY)
torch.library.register_autograd("crosslayer::depth_attention", _backward, setup_context=_remember, lib=_LIBRARY)
register_flop_formula(_OPERATORS.depth_attention)(_flops)

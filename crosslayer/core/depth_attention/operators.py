"""Attention over depth as an operator of torch, `crosslayer::depth_attention`, and how its gradients are built.

A reader does not build a gradient for each of its sources: it records the terms of the gradient with the source, which
`keep` made a node of autograd's graph, and which sums them once all of its readers are done. A pair then costs
one pass over the source and one over the reader's gradient. It is the same when a model is compiled: terms are recorded
as the backward pass is traced. Tensors that did not pass through `keep` get a gradient from each reader.

The definition runs instead under `torch.func`, for double backward, for several backward passes at once, and in what is
exported, which has to run elsewhere.

Shapes: T tokens of all sequences, N sources, C hidden.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from crosslayer.core.depth_attention.plain import (
    attend,
    differentiate,
    listed,
    promoted,
    read,
    source_gradient,
)
from crosslayer.core.sources import Sources

# sources in a bank, whose memory is freed as a whole: one bank for all of them took 1.7 times the peak memory under
# checkpointing
SLOTS = 8
# Terms of a source's gradient that wait at least: each sum of them reads and writes the gradient again. With 8 a step
# under checkpointing takes 1.01 of the plain decoder's memory instead of 1.03, but one with blocks 1.056, not 1.049.
MOST_TERMS = 16

_LIBRARY, _OPERATORS = torch.library.Library("crosslayer", "FRAGMENT"), torch.ops.crosslayer


def depth_attention(sources: Sequence[Tensor], direction: Tensor, eps: float, normed: bool = False) -> Tensor:
    """Return Σ_i α_i v_i (…, C) over sources (…, C) for a direction (C,); `normed`: of v_i / rms(v_i)."""
    sources = list(sources)
    # without the dispatcher, which would take a tenth of a decoding step's read
    if is_inference() and _kernels(len(sources), *sources) is None:
        return read(sources, direction, eps, normed)
    if uses_definition():
        return listed(sources, direction, eps, normed)
    return _OPERATORS.depth_attention(sources, direction, eps, normed)[0]


def keep(source: Tensor, earlier: Sources, total: int) -> Sources:
    """Return the earlier sources and one (…, C) more, whose gradient is built once for all of its readers.

    That gradient arrives at `source`, not at the tensor that is returned. In training on a CPU the source is copied to
    memory behind the earlier ones, which readers take as one operand.

    Args:
        source: the output of a sublayer, or the embedding.
        earlier: the sources before it.
        total: the largest number of sources that there will be.
    """
    if uses_definition() or not (torch.is_grad_enabled() and source.requires_grad):
        return earlier.with_newest(source)
    if torch.compiler.is_compiling():
        return earlier.with_newest(_as_source(source))  # type: ignore[not-callable]  # as the decorator is annotated
    bank, index = earlier.bank, len(earlier)
    # Checkpointing and offloading free sources one by one, which a bank would hold. A dispatch mode may bring tensors
    # without data, and what is computed again must not depend on whether a slot is free.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[implicit-import]
    if source.device.type != "cpu" or hooks is not None or _get_current_dispatch_mode() is not None:
        bank = None
    elif bank is not None and index < bank.next:
        # its slot is taken: the source is computed again, or begins a branch
        bank = None
    elif (
        bank is None
        or not index == bank.next < bank.end
        or (source.shape, source.dtype) != (bank.values.shape[1:], bank.values.dtype)
    ):
        capacity = min(SLOTS, total - index)
        # the last source would be alone in its bank
        bank = _Bank(source.new_empty(capacity, *source.shape), index, index + capacity) if capacity > 1 else None
    return Sources((*earlier, _Source.apply(source, bank)), bank or earlier.bank)


@dataclass(eq=False)
class _Bank:
    """Memory for sources of equal shape and type, one behind another."""

    values: Tensor  # (n, …, C), the memory
    next: int  # the index of the next source, the first of all being 0
    end: int  # the index of the first source that it has no space for


class _Term(NamedTuple):
    """The term that one reader adds to the gradient of a source."""

    grad: Tensor  # (…, C), of the reader's result
    share: Tensor  # (T,), α, over rms(v) if sources are normed
    slope: Tensor  # (T,), gradient of the score, over rms(v)
    shrink: Tensor  # (T,), the multiple of the source itself, since its norm divides the score
    direction: Tensor  # (C,)


@dataclass(eq=False)
class _Terms:
    """The gradient of a source in one backward pass: terms of readers that wait, and the sum of earlier ones."""

    waiting: list[_Term] = field(default_factory=list)
    sum: Tensor | None = None


class _Source(torch.autograd.Function):
    """The identity; its backward pass sums the gradient terms that readers recorded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, bank: _Bank | None) -> Tensor:
        ctx.set_materialize_grads(False)
        # of the backward pass that records terms: one that was interrupted leaves terms, which the next must not add
        ctx.task, ctx.terms = None, None
        if bank is None:
            result = value.view_as(value)
        else:
            slot = bank.next - bank.end  # from the end
            bank.values[slot].copy_(value)
            bank.next += 1
            # a plain view would share its version with later copies, and backward would refuse the saved source
            result = bank.values.data[slot]
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[bad-override]
        terms, ctx.terms = ctx.terms, None
        if terms is None or ctx.task != torch._C._current_graph_task_id():
            return grad, None
        if terms.sum is not None:
            grad = terms.sum if grad is None else grad + terms.sum
        return _gradient(ctx.saved_tensors[0], terms.waiting, grad) if terms.waiting else grad, None


# put into dynamo's graph as it is, so that its node collects terms when the backward pass is traced
@torch.compiler.allow_in_graph
def _as_source(value: Tensor) -> Tensor:
    return _Source.apply(value, None)


def _gradient(source: Tensor, terms: Sequence[_Term], arrived: Tensor | None) -> Tensor:
    grads, shares, slopes, shrinks, directions = map(list, zip(*terms, strict=True))
    return _OPERATORS.depth_attention_source_gradient(
        source, grads, shares, slopes, shrinks, directions, arrived
    )  # (…, C)


class _Read(torch.autograd.Function):
    """The weighted sum over N sources, scores and inverse RMS; its backward pass leaves terms with the sources."""

    @staticmethod
    def forward(
        ctx: Any, eps: float, normed: bool, direction: Tensor, *sources: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # the operator's own gradient is this function: its kernel is called, not this again
        with torch._C._AutoDispatchBelowAutograd():
            result, scores, inverse = _OPERATORS.depth_attention(list(sources), direction, eps, normed)
        nodes = [source.grad_fn for source in sources]
        ctx.nodes = [node if isinstance(node, _Source._backward_cls) else None for node in nodes]  # type: ignore[attr-defined]
        ctx.eps, ctx.normed = eps, normed
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(scores, inverse)
        ctx.save_for_backward(direction, scores, inverse, *sources)
        return result, scores, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        if grad is None:
            return None, None, *[None] * (len(ctx.nodes) + 1)
        # read once, as checkpointing requires
        direction, scores, inverse, *sources = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        # torch may compile the backward pass as a whole, with nodes of its own in place of those of the forward pass
        compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
        is_compiled = compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region
        # terms in nodes serve one pass of numbers: not one that is differentiated itself, nor one of batched gradients
        if not is_compiled and (
            torch.is_grad_enabled() or uses_definition() or torch._C._functorch.is_legacy_batchedtensor(grad)
        ):
            return None, None, *gradients_of_definition((direction, *sources), ctx.eps, ctx.normed, grad, needed)
        shares, slopes, shrinks, toward = _OPERATORS.depth_attention_backward(
            grad, scores, inverse, sources, direction, ctx.normed
        )
        gradients: list[Tensor | None] = []
        nodes: list[Any] = [None] * len(sources) if is_compiled else ctx.nodes
        for index, (source, node) in enumerate(zip(sources, nodes, strict=True)):
            term = _Term(grad, shares[index], slopes[index], shrinks[index], direction)
            if node is not None and torch._C._will_engine_execute_node(node):
                if node.terms is None or node.task != torch._C._current_graph_task_id():
                    node.task, node.terms = torch._C._current_graph_task_id(), _Terms()
                terms = node.terms
                terms.waiting.append(term)
                # summed, so that the readers' gradients can be freed: beyond as many readers as sources they take more
                # memory than a sum for each source
                if len(terms.waiting) >= max(MOST_TERMS, len(sources)):
                    terms.sum, terms.waiting = _gradient(source, terms.waiting, terms.sum), []
            ordinary = needed[index + 1] and node is None
            gradients.append(_gradient(source, [term], None) if ordinary else None)
        return None, None, toward.to(direction.dtype), *gradients


def uses_definition() -> bool:
    """Return whether the definition has to run: for `torch.func`, forward-mode gradients and export."""
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return transformed or torch.compiler.is_exporting()


def is_inference() -> bool:
    """Return whether only numbers are wanted, eagerly: no gradient, no graph, and no dispatch mode that counts."""
    # a mode must see the operator, for example to count its FLOPs
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    return not uses_definition()


def gradients_of_definition(
    inputs: Sequence[Tensor], eps: float, normed: bool, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of direction and sources that need one, which can be differentiated if that is asked for."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # gradients stop at these views: a source may depend on another one
        inputs = [tensor.view_as(tensor) for tensor in inputs]
        output = listed(inputs[1:], inputs[0], eps, normed)
    required = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(output, required, grad, create_graph=again, allow_unused=True))
    return [next(gradients) if need else None for need in needed]


@functools.cache
def triton_kernels(device: torch.device) -> ModuleType | None:
    """Return the module of Triton's kernels, None where the device or Triton is not there."""
    from torch.utils._triton import has_triton

    is_there = device.type == "cuda" and has_triton()
    return importlib.import_module("crosslayer.core.kernels.depth_attention") if is_there else None


def _kernels(count: int, *tensors: Tensor) -> Any:
    """Return the module of Triton's kernels if they support this number of sources or readers, and these tensors."""
    kernels: Any = triton_kernels(tensors[0].device)
    # the kernels compute in float32
    if kernels is None or count > kernels.SIZES[-1] or any(tensor.dtype == torch.float64 for tensor in tensors):
        return None
    return kernels


def _rows(tensor: Tensor) -> Tensor:
    """Return (…, C) as (T, C), contiguous, as the kernels for GPUs need it."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _attend(
    sources: list[Tensor], direction: Tensor, eps: float, normed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _kernels(len(sources), *sources)
    if kernels is None:
        return attend(sources, direction, eps, normed)
    result, scores, inverse = kernels.attend([_rows(source) for source in sources], direction, eps, normed)
    return result.view(sources[0].shape), scores, inverse


def _differentiate(
    grad: Tensor, scores: Tensor, inverse: Tensor, sources: list[Tensor], direction: Tensor, normed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = _kernels(len(sources), grad, *sources)
    if kernels is None:
        return differentiate(grad, scores, inverse, sources, direction, normed)
    rows = [_rows(source) for source in sources]
    return kernels.differentiate(_rows(grad), scores, inverse, rows, direction, normed)


def _source_gradient(
    source: Tensor,
    grads: list[Tensor],
    shares: list[Tensor],
    slopes: list[Tensor],
    shrinks: list[Tensor],
    directions: list[Tensor],
    arrived: Tensor | None,
) -> Tensor:
    kernels = _kernels(len(grads), source, *grads)
    if kernels is None:
        return source_gradient(source, grads, shares, slopes, shrinks, directions, arrived)
    gradient = kernels.gradient(
        _rows(source),
        [_rows(grad) for grad in grads],
        torch.stack(shares),  # (R, T)
        torch.stack(slopes),  # (R, T)
        torch.stack(shrinks).sum(dim=0),  # (T,)
        torch.stack(directions).float(),  # (R, C)
        None if arrived is None else _rows(arrived),
    )
    return gradient.view(source.shape)


def _fake_attend(
    sources: list[Tensor], direction: Tensor, eps: float, normed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = promoted(sources)
    wide = torch.promote_types(dtype, torch.float32)
    scores = direction.new_empty(len(sources), sources[0].numel() // len(direction), dtype=wide)  # (N, T)
    return sources[0].new_empty(sources[0].shape, dtype=dtype), scores, torch.empty_like(scores)


def _fake_differentiate(
    grad: Tensor, scores: Tensor, inverse: Tensor, sources: list[Tensor], direction: Tensor, normed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # strides must be those of the kernels' outputs: inductor relies on them, and fails on a GPU alone
    shares, slopes, shrinks = (torch.empty_like(scores) for _ in range(3))
    return shares, slopes, shrinks, scores.new_empty(direction.shape)


def _register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `crosslayer::name` for all devices by its schema, with the shapes that it returns (`fake`)."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"crosslayer::{name}", fake, lib=_LIBRARY)


_register(
    "depth_attention(Tensor[] sources, Tensor direction, float eps, bool normed=False) -> (Tensor, Tensor, Tensor)",
    _attend,
    _fake_attend,
)
_register(
    "depth_attention_backward(Tensor grad, Tensor scores, Tensor inverse, Tensor[] sources, Tensor direction, "
    "bool normed=False) -> (Tensor, Tensor, Tensor, Tensor)",
    _differentiate,
    _fake_differentiate,
)
_register(
    "depth_attention_source_gradient(Tensor source, Tensor[] grads, Tensor[] shares, Tensor[] slopes, "
    "Tensor[] shrinks, Tensor[] directions, Tensor? arrived) -> Tensor",
    _source_gradient,
    lambda source, *_: source.new_empty(source.shape),
)
# `torch.library.register_autograd` flattens lists of tensors in Python, which takes as long as a small read
_LIBRARY.impl(
    "depth_attention",
    lambda sources, direction, eps, normed=False: _Read.apply(eps, normed, direction, *sources),
    "Autograd",
)
register_flop_formula(_OPERATORS.depth_attention)(  # two products with each source
    lambda sources, *_, **__: 4 * sum(shape.numel() for shape in sources)
)

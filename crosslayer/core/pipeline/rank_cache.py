"""Tensors and gradients that the pipeline stages of one rank keep for each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Microbatch:
    """The tensors of one microbatch that the stages of a rank keep, by number.

    Attributes:
        tensors: the kept tensors, detached.
        grads: what later stages stored for the stages that kept the tensors.
        has_kept: whether a stage has kept tensors; the first such stage is the last in backward.
    """

    tensors: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)
    has_kept: bool = False

    def restore(self, numbers: Sequence[int], tensors: Mapping[int, Tensor], stream: int) -> dict[int, Tensor]:
        """Return `tensors` together with kept ones, whose gradients are stored in the backward pass.

        Args:
            numbers: the kept tensors to add.
            tensors: the tensors that the stage received, by number.
            stream: the number of the stream, which always has a gradient.
        """
        kept = {number: self.tensors[number] for number in numbers}
        trained = [number for number in numbers if kept[number].requires_grad]
        if not trained:
            return {**tensors, **kept}
        outputs = _Restore.apply(self.grads, trained, tensors[stream], *[kept[number] for number in trained])
        return {**tensors, **kept, **dict(zip([stream, *trained], outputs, strict=True))}

    def keep(self, numbers: Sequence[int], tensors: Mapping[int, Tensor], stream: int) -> dict[int, Tensor]:
        """Keep tensors; return `tensors` with a stream whose backward adds the stored gradients of those kept."""
        # detached, since a schedule runs the backward pass of each stage by itself
        for number in numbers:
            self.tensors[number] = tensors[number].detach().requires_grad_(tensors[number].requires_grad)
        trained = [number for number in numbers if tensors[number].requires_grad]
        if not trained:
            return dict(tensors)
        first = not self.has_kept
        self.has_kept = True
        output = _Keep.apply(self.grads, trained, first, tensors[stream], *[tensors[number] for number in trained])
        return {**tensors, stream: output}


class _Restore(torch.autograd.Function):
    """Returns kept tensors; backward adds their gradients to the stored ones.

    The stream passes through, so that every backward pass to the inputs of the stage runs this function.
    """

    @staticmethod
    def forward(
        ctx: Any, grads: dict[int, Tensor], numbers: list[int], stream: Tensor, *kept: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.grads, ctx.numbers = grads, numbers
        ctx.set_materialize_grads(False)
        return stream.view_as(stream), *(tensor.view_as(tensor) for tensor in kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        stream, *grads = gradients
        for number, grad in zip(ctx.numbers, grads, strict=True):
            if grad is not None:
                ctx.grads[number] = ctx.grads[number] + grad if number in ctx.grads else grad
        return None, None, stream, *(None for _ in grads)


class _Keep(torch.autograd.Function):
    """Passes the stream through; backward gives kept tensors their stored gradients.

    Later stages have stored them by then, since the gradient of the stream comes through all of these stages.
    """

    @staticmethod
    def forward(
        ctx: Any, grads: dict[int, Tensor], numbers: list[int], first: bool, stream: Tensor, *kept: Tensor
    ) -> Tensor:
        ctx.grads, ctx.numbers, ctx.first = grads, numbers, first
        ctx.set_materialize_grads(False)
        return stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (stream,) = gradients
        stored = [ctx.grads.pop(number, None) for number in ctx.numbers]
        assert not (ctx.first and ctx.grads), "some stored gradients were not used by any stage"
        return None, None, None, stream, *stored

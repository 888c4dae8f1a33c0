"""What the stages of a rank keep for each other of a microbatch: tensors on the way up, gradients down."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Microbatch:
    """What the stages of a rank have kept of one microbatch, by number."""

    def __init__(self):
        self.tensors: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}  # that later stages have left for the stages that kept the tensors
        self.kept = False  # whether a stage has kept tensors; the first of them takes the last gradient

    def restore(self, numbers: Sequence[int], tensors: Mapping[int, Tensor], stream: int) -> dict[int, Tensor]:
        """Return `tensors` with those that have been kept; backward leaves the gradients of these.

        Args:
            numbers: what has been kept.
            tensors: what a stage has been sent.
            stream: which of these has a gradient in any case.

        """
        kept = {number: self.tensors[number] for number in numbers}
        trained = [number for number in numbers if kept[number].requires_grad]
        if not trained:
            return {**tensors, **kept}
        outputs = _Restore.apply(self.grads, trained, tensors[stream], *[kept[number] for number in trained])
        return {**tensors, **kept, **dict(zip([stream, *trained], outputs, strict=True))}

    def keep(self, numbers: Sequence[int], tensors: Mapping[int, Tensor], stream: int) -> dict[int, Tensor]:
        """Keep tensors, and return `tensors` with a stream whose backward takes what is left for them."""
        for number in numbers:
            self.tensors[number] = tensors[number].detach().requires_grad_(tensors[number].requires_grad)
        trained = [number for number in numbers if tensors[number].requires_grad]
        if not trained:
            return dict(tensors)
        first, self.kept = not self.kept, True
        outputs = _Keep.apply(self.grads, trained, first, tensors[stream], *[tensors[number] for number in trained])
        return {**tensors, stream: outputs}


class _Restore(torch.autograd.Function):
    """Hands out what has been kept, and adds its gradients to what is left for them.

    The stream goes through, so that a backward pass to the inputs of the stage comes through here.
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
    """Passes the stream; backward gives kept tensors the gradients that were left for them.

    The stages that leave them have been there before: the gradient of the stream comes through all of them.
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
        taken = [ctx.grads.pop(number, None) for number in ctx.numbers]
        assert not (ctx.first and ctx.grads), "gradients are left that no stage takes"
        return None, None, None, stream, *taken

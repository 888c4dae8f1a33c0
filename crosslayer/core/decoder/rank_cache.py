"""What the stages of a rank keep for each other, microbatch by microbatch: tensors on the way up, gradients down."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Deposits:
    """Gradients (by number) that later stages have left for the stages that kept the tensors."""

    def __init__(self):
        self.grads: dict[int, Tensor] = {}
        self.keepers = 0  # stages that have kept tensors; the first of them takes the last gradient

    def add(self, number: int, grad: Tensor | None) -> None:
        """Leave a gradient, on top of what is there; None for none."""
        if grad is not None:
            self.grads[number] = self.grads[number] + grad if number in self.grads else grad

    def take(self, number: int) -> Tensor | None:
        """Return what has been left, None if nothing has."""
        return self.grads.pop(number, None)


class Microbatch:
    """What the stages of a rank have kept of one microbatch, by number."""

    def __init__(self):
        self.tensors: dict[int, Tensor] = {}
        self.deposits = Deposits()

    def find(self, numbers: Sequence[int], tensors: Mapping[int, Tensor], stream: int) -> dict[int, Tensor]:
        """Return `tensors` with those that have been kept; backward deposits the gradients of these.

        Args:
            numbers: what has been kept.
            tensors: what a stage has been sent.
            stream: which of these has a gradient in any case.

        """
        found = {number: self.tensors[number] for number in numbers}
        wanted = [number for number in numbers if found[number].requires_grad]
        if not wanted:
            return {**tensors, **found}
        outputs = _Find.apply(self.deposits, wanted, tensors[stream], *[found[number] for number in wanted])
        return {**tensors, **found, **dict(zip([stream, *wanted], outputs, strict=True))}

    def keep(self, numbers: Sequence[int], tensors: Mapping[int, Tensor], stream: int) -> dict[int, Tensor]:
        """Keep tensors, and return `tensors` with a stream whose backward takes what is deposited for them."""
        for number in numbers:
            self.tensors[number] = tensors[number].detach().requires_grad_(tensors[number].requires_grad)
        wanted = [number for number in numbers if tensors[number].requires_grad]
        if not wanted:
            return dict(tensors)
        outputs = _Keep.apply(self.deposits, wanted, tensors[stream], *[tensors[number] for number in wanted])
        return {**tensors, stream: outputs}


class RankCache:
    """The microbatches that wait for the next stage of the rank; they pass all of its stages in the same order."""

    def __init__(self):
        self._waiting: dict[int, deque[Microbatch]] = defaultdict(deque)

    def leave(self, stage: int, microbatch: Microbatch) -> None:
        """Leave a microbatch for a later stage."""
        self._waiting[stage].append(microbatch)

    def take(self, stage: int) -> Microbatch:
        """Return the microbatch that has waited longest for a stage."""
        return self._waiting[stage].popleft()

    def left(self) -> int:
        """Return how many microbatches wait: 0 after every step."""
        return sum(len(queue) for queue in self._waiting.values())


class _Find(torch.autograd.Function):
    """Hands out what has been kept, and deposits its gradients.

    The stream goes through, so that a backward pass to the inputs of the stage comes through here.
    """

    @staticmethod
    def forward(ctx: Any, deposits: Deposits, numbers: list[int], stream: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        ctx.deposits, ctx.numbers = deposits, numbers
        ctx.set_materialize_grads(False)
        return stream.view_as(stream), *(tensor.view_as(tensor) for tensor in kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        stream, *grads = gradients
        for number, grad in zip(ctx.numbers, grads, strict=True):
            ctx.deposits.add(number, grad)
        return None, None, stream, *(None for _ in grads)


class _Keep(torch.autograd.Function):
    """Passes the stream; backward gives kept tensors the gradients deposited for them.

    The stages that deposit have been there before: the gradient of the stream comes through all of them.
    """

    @staticmethod
    def forward(ctx: Any, deposits: Deposits, numbers: list[int], stream: Tensor, *kept: Tensor) -> Tensor:
        ctx.deposits, ctx.numbers = deposits, numbers
        ctx.first = deposits.keepers == 0
        deposits.keepers += 1
        ctx.set_materialize_grads(False)
        return stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (stream,) = gradients
        taken = [ctx.deposits.take(number) for number in ctx.numbers]
        assert not (ctx.first and ctx.deposits.grads), "gradients are left that no stage takes"
        return None, None, stream, *taken

"""Tensors in the carry whose number or names differ from layer to layer: outputs of earlier sublayers, shared states.

As tuples and dicts, FSDP2 would wrap each tensor again in every layer, and a layer that is compiled by itself would be
compiled again in every layer, until the compiler gives up. So they are objects that both pass on as they are, and
functions that open them stay outside of the graph of a single layer.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

BY_LAYER = "layers_compile_alone"  # key in the carry: the model itself is not compiled, so its layers may be

Function = TypeVar("Function", bound=Callable[..., Any])


class Sources(Sequence[Tensor]):
    """Tensors, oldest first; never changed.

    Attributes:
        opened: the tensors.
        bank: memory in which they lie one behind another, if there is any.
    """

    __slots__ = ("bank", "opened")

    def __init__(self, tensors: Sequence[Tensor] = (), bank: Any = None):
        self.opened, self.bank = tuple(tensors), bank

    def __len__(self) -> int:
        return len(self.opened)

    def __getitem__(self, index: Any) -> Any:
        return self.opened[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.opened)

    def with_newest(self, tensor: Tensor) -> "Sources":
        """Return these tensors and one more."""
        return Sources((*self.opened, tensor), self.bank)

    def to(self, *args: Any, **kwargs: Any) -> "Sources":
        """Move the tensors, as accelerate asks of what enters a layer on another device."""
        # without the bank: it holds the values on the old device
        return Sources([tensor.to(*args, **kwargs) for tensor in self.opened])


class SharedStates:
    """Queries, keys and values that later layers read, by name; never changed."""

    __slots__ = ("opened",)

    def __init__(self, states: Mapping[str, Tensor | None]):
        self.opened = dict(states)

    def __getitem__(self, name: str) -> Tensor | None:
        return self.opened[name]

    def updated(self, states: Mapping[str, Tensor | None]) -> "SharedStates":
        """Return these states and others."""
        return SharedStates({**self.opened, **states})

    def to(self, *args: Any, **kwargs: Any) -> "SharedStates":
        """Move the tensors, as accelerate asks of what enters a layer on another device."""
        moved = {name: None if state is None else state.to(*args, **kwargs) for name, state in self.opened.items()}
        return SharedStates(moved)


def outside_layer_graphs(function: Function) -> Function:
    """Run a function of (…, carry) eagerly in layers that are compiled one by one; in a whole model it is compiled.

    The carry is its last argument, by position.
    """
    eager = torch.compiler.disable(function)

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        # in a whole model a function that is disabled would break the only graph
        by_layer = torch.compiler.is_compiling() and BY_LAYER in args[-1]
        return (eager if by_layer else function)(*args, **kwargs)

    return either  # type: ignore[return-value]

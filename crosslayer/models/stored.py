"""Gives weights other data for a while, such as that of the dtype in which they are saved."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def replaced(weights: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Give weights other data inside the block, which may be of another dtype."""
    own = {weight: weight.data for weight in weights}
    try:
        for weight, data in weights.items():
            weight.data = data
        yield
    finally:
        for weight, data in own.items():
            weight.data = data

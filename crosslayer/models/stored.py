"""Saves weights in the dtype of a checkpoint: on a CPU a model is computed in a wider one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


@contextmanager
def weights_in(model: PreTrainedModel, dtype: torch.dtype | None) -> Iterator[None]:
    """Give a model's weights another dtype inside the block; None leaves them as they are."""
    own = {weight: weight.data for weight in model.parameters() if dtype not in (None, weight.dtype)}
    try:
        for weight, data in own.items():
            weight.data = data.to(dtype)
        yield
    finally:
        for weight, data in own.items():
            weight.data = data

"""The dtype of a checkpoint's weights, kept by what is made of it: on a CPU a model is computed in a wider one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig, PreTrainedModel


def stored_dtype(model: PreTrainedModel, config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype in which a model's files have its weights, by their config; the model's own where narrower."""
    stored = config.dtype
    return stored if isinstance(stored, torch.dtype) and stored.itemsize < model.dtype.itemsize else model.dtype


@torch.no_grad()
def round_to_stored(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights to the dtype in which they will be saved; they keep the dtype that they are computed in."""
    for weight in model.parameters():
        rounded = weight.to(dtype).to(weight.dtype)
        if not torch.equal(rounded, weight):  # others may share memory with the original
            weight.data = rounded


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

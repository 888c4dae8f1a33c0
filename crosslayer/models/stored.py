"""The dtype of a checkpoint's weights, kept by what is made of it: on a CPU a model is computed in a wider one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from crosslayer.models.load import load_config


def stored_dtype(source: PreTrainedModel | str | Path, model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which a change of `model` is saved: that of its checkpoint, or its own if that is narrower.

    `source` is the name that the model was loaded from, or the model itself.
    """
    own = None if isinstance(source, PreTrainedModel) else load_config(str(source)).dtype
    return min(model.dtype, own or model.dtype, key=lambda dtype: dtype.itemsize)


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round a model's weights to those of `dtype`, in which it will be saved; they keep their own dtype."""
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

"""The dtype of a checkpoint's weights, kept by what is made of it: on a CPU a model is computed in a wider one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from crosslayer.models.load import load_config


@torch.no_grad()
def round_to_stored(
    changed: PreTrainedModel, model: PreTrainedModel, source: PreTrainedModel | str | Path
) -> torch.dtype:
    """Round the weights of a changed model to the dtype in which it will be saved, and return this dtype.

    It is that of the files of `source`, from which `model` was loaded, or the model's own where that is narrower. The
    weights keep the dtype that they are computed in.
    """
    dtype = model.dtype
    stored = None if isinstance(source, PreTrainedModel) else load_config(str(source)).dtype
    if isinstance(stored, torch.dtype) and stored.itemsize < dtype.itemsize:
        dtype = stored
    for weight in changed.parameters():
        rounded = weight.to(dtype).to(weight.dtype)
        if not torch.equal(rounded, weight):  # others may share memory with the original
            weight.data = rounded
    return dtype


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

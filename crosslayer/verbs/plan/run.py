"""The wiring of a model, from its config alone."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.wiring.read import read_plan
from crosslayer.wiring.result import ModelPlan


def plan(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    *,
    length: int = 4096,
    dtype: str | torch.dtype | None = None,
) -> ModelPlan:
    """Show the wiring of a model from its config alone: who reads whom, masks, residual, and bytes of the cache.

    Args:
        model: hub name (its config.json alone is fetched), local folder (which needs no weights), smollm2 or minilm. In
            Python also a model or a config.
        length: tokens in the cache.
        dtype: of the cache; default the checkpoint's own, bfloat16 where the config names none.

    Raises:
        ValueError: there is no such model, its config says nothing of layers with attention, or something that is not
            known here.

    """
    return read_plan(model, length, dtype)

"""Which layers of a model share keys, values or attention, from its config alone."""

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
    """Show from the config alone which layers read others' keys and values, masks, residual stream, and KV cache size.

    Args:
        model: hub name (only its config.json is downloaded), local folder (weights are not needed), smollm2 or minilm.
            In Python also a model or a config.
        length: tokens in the KV cache.
        dtype: dtype of the KV cache; default that of the config, else bfloat16.

    Raises:
        ValueError: the model does not exist, or its config describes no attention layers or something unsupported.

    """
    return read_plan(model, length, dtype)

"""Which parameters a stage trains: W_c alone, all of them, or adapters of low rank that are merged when it ends."""

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from crosslayer.core.method import Compensation
from crosslayer.verbs.heal.recipe import LoraPart, StagePart


def compensations(model: nn.Module) -> list[Compensation]:
    """Return every W_c of a model, from below."""
    return [module for module in model.modules() if isinstance(module, Compensation)]


def check_parameters(stages: Sequence[StagePart]) -> None:
    """Refuse stages whose parameters need what is not installed.

    Raises:
        ValueError: there are adapters, and peft is missing.

    """
    if any(stage.parameters == "lora" for stage in stages) and importlib.util.find_spec("peft") is None:
        raise ValueError("stages with parameters: lora need peft: pip install 'crosslayer[heal]'")


def unfreeze(model: PreTrainedModel, parameters: str, lora: LoraPart | None = None) -> PreTrainedModel:
    """Let a stage's parameters alone have gradients, and return what trains: the model, or the model with adapters."""
    if parameters == "lora":
        return _with_adapters(model, lora or LoraPart())
    model.requires_grad_(parameters == "all")
    if parameters == "compensation":
        for module in compensations(model):
            module.requires_grad_(True)
    return model


def trained_parameters(model: nn.Module) -> int:
    """Return how many numbers a stage trains."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def merged(model: PreTrainedModel, parameters: str) -> PreTrainedModel:
    """Return the model after a stage, adapters added into the weights that they adapt."""
    if parameters != "lora":
        return model
    wrapped: Any = model
    return wrapped.merge_and_unload(safe_merge=True)


def _with_adapters(model: PreTrainedModel, lora: LoraPart) -> PreTrainedModel:
    """Wrap every linear map but the head; a map that several layers share gets a single adapter, which they share."""
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",  # type: ignore[arg-type]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers has changed
        return get_peft_model(model, options)  # type: ignore[return-value]

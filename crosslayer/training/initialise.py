"""Paired initial weights: each tensor is drawn from hash(seed, its name), whatever other tensors the model has.

So models with different methods have identical values in all tensors that they have in common. The distribution of each
tensor is the model's own.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization


def initialise(model: PreTrainedModel, seed: int) -> None:
    """Initialise every parameter of a model; the random state of the process does not change.

    Values are drawn in float32 on the CPU and then rounded, so that they are the same on any device and, up to
    rounding, in any dtype. A tied tensor is drawn under its first name. Initialise a model before wrapping it, since
    wrappers change names.
    """
    named = dict(model.named_parameters())
    meta = [name for name, parameter in named.items() if parameter.is_meta]
    if meta:
        raise ValueError(f"{meta[0]} is on the meta device; allocate the model before initializing it")
    try:
        for parameter in named.values():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers does not initialise it
        with torch.random.fork_rng(devices=[]), torch.no_grad(), initialization.guard_torch_init_functions():
            for name, parameter in named.items():
                _draw(model, name, parameter, seed)
    finally:
        for parameter in named.values():
            del parameter._is_hf_initialized  # type: ignore[attr-defined]


def _draw(model: PreTrainedModel, name: str, parameter: nn.Parameter, seed: int) -> None:
    """Draw a single parameter as its module initializes it; the others are marked and do not change."""
    module, stored = model.get_submodule(name.rpartition(".")[0]), parameter.data
    parameter.data = torch.full(stored.shape, math.nan, device="cpu")
    try:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        parameter._is_hf_initialized = False  # type: ignore[attr-defined]
        model._init_weights(module)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        first: Tensor = parameter.data
    finally:
        parameter.data = stored
    if first.isnan().any():
        raise ValueError(f"{name} is not initialized; set it where {type(module).__name__} resets its parameters")
    stored.copy_(first)

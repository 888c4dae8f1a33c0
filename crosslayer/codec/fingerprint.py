"""Fingerprints of models and tokenizers: a codec refuses any others. They catch mistakes, not attacks."""

import hashlib
import json
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SUMMED = 2**22  # weights of a fingerprint at a time
# Each check reads one number of this many parameters: 0.38 ms for SmolLM2, with the versions and addresses of all 272.
# Reading one number of every parameter takes 1.7 to 2.2 ms.
SAMPLED = 32


def tokenizer_print(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fingerprint of a tokenizer's vocabulary."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def model_print(model: PreTrainedModel) -> str:
    """Return a fingerprint of a model's weights and angles, equal in float32 and in bfloat16."""
    return weights_print(model.config, sorted(model.named_parameters()))


@torch.no_grad()
def weights_print(config: PreTrainedConfig, weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return the fingerprint of a model from its parameters by name, in alphabetical order.

    Two sums over each tensor's numbers as bfloat16, one of them weighted by position.
    """
    text: Any = config.get_text_config()
    facts = [getattr(text, "rope_parameters", None), getattr(text, "sliding_window", None), text.num_hidden_layers]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, weight in weights:
        sums = [0, 0]
        for part in weight.detach().reshape(-1).split(SUMMED):
            # in bfloat16, so that a model has one fingerprint in either dtype
            bits = part.to(torch.bfloat16).view(torch.int16).to(torch.int64)
            # numbers that change places leave the plain sum as it is, but not this one
            order = torch.arange(len(bits), device=bits.device) % 8191 + 1
            sums = [sums[0] + int(bits.sum()), sums[1] * 31 % 2**61 + int((bits * order).sum())]
        digest.update(f"{name} {tuple(weight.shape)} {sums}".encode())
    return digest.hexdigest()


class SeenWeights:
    """Weights that were read once, so that a change of them is noticed without reading them again.

    An optimizer's step raises a parameter's `_version`, and another tensor in its place has another address. Changes
    through `.data`, as PEFT makes them when it merges an adapter, leave both as they are. So one number of each
    parameter is kept, too, and `SAMPLED` neighboring parameters are compared at each call, in turn: a change of all
    layers is noticed at once, a change of one parameter after some calls.
    """

    def __init__(self, model: PreTrainedModel):
        parameters = _parameters(model, [])
        self._model = weakref.ref(model)
        self._marks = _marks(parameters)
        self._numbers = _numbers(parameters)
        self._turn = 0

    def same(self, model: PreTrainedModel) -> bool:
        """Return whether this is the model that was read, and nothing is seen to have changed."""
        if self._model() is not model:
            return False
        parameters = _parameters(model, [])
        if _marks(parameters) != self._marks:
            return False
        first = self._turn if self._turn < len(parameters) else 0
        self._turn = first + SAMPLED
        return _numbers(parameters[first : self._turn]) == self._numbers[first : self._turn]


def _parameters(module: nn.Module, found: list[nn.Parameter]) -> list[nn.Parameter]:
    """Add a module's parameters to a list, and return it; four times as fast as `parameters()`, which drops repeats."""
    found += [parameter for parameter in module._parameters.values() if parameter is not None]
    for child in module._modules.values():
        if child is not None:
            _parameters(child, found)
    return found


def _marks(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Return each parameter's address and version; those made in inference mode have no version."""
    return [(weight.data_ptr(), -1 if weight.is_inference() else weight._version) for weight in parameters]


def _numbers(parameters: Sequence[nn.Parameter]) -> list[float]:
    """Return the number in the middle of each parameter."""
    return [float(weight.detach().reshape(-1)[weight.numel() // 2]) for weight in parameters if weight.numel()]

"""Fingerprints of models and tokenizers. With them a codec refuses others; they catch mistakes, not attacks."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SUMMED = 2**22  # weights at a time


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

    Two sums over each tensor's numbers as bfloat16, one of them weighted by position: for mistakes, not for attacks.
    """
    text: Any = config.get_text_config()
    facts = [getattr(text, "rope_parameters", None), getattr(text, "sliding_window", None), text.num_hidden_layers]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, weight in weights:
        sums = [0, 0]
        for part in weight.detach().reshape(-1).split(SUMMED):
            bits = part.to(torch.bfloat16).view(torch.int16).to(torch.int64)
            order = torch.arange(len(bits), device=bits.device) % 8191 + 1
            sums = [sums[0] + int(bits.sum()), sums[1] * 31 % 2**61 + int((bits * order).sum())]
        digest.update(f"{name} {tuple(weight.shape)} {sums}".encode())
    return digest.hexdigest()

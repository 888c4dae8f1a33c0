"""What tests of quantized caches share."""

import torch

from crosslayer.cache.quantizers import rotated


def add_key_biases(model, size=5):
    """Let the key projections of a Qwen 2 have biases that exceed the rest of the keys, as trained ones do."""
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.data.normal_(0, size, generator=torch.Generator().manual_seed(0))


def shift_of(offset, tokens):
    """Return what is subtracted from the keys of tokens, (1, H_kv, T, D)."""
    return rotated(offset.at(torch.arange(tokens)[None]), back=True)

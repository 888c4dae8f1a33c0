"""Tiny decoders in float64 and helpers to run them, for `crosslayer.testing` and for tests.

Shapes: B batch, T tokens, V vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.methods import Entry
from crosslayer.core.transformers_versions import CACHE

# logits reach about 10 in float64, so this allows for another order of sums and nothing else
TOLERANCE = 1e-10
FLOAT32 = 1e-4  # for models that compute partly in float32 whatever their dtype
# for these with a quantized cache, whose scales of 16 bits may then round the other way (2e-4 was seen)
ROUNDED = 1e-2
VOCABULARY = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def config_of(methods: Entry | Sequence[Entry] | None, **shape: Any) -> CrossLayerConfig:
    """Return the config of a tiny decoder: `SHAPE` updated by `shape`, with one method, a list of them, or None."""
    entries = list(methods) if isinstance(methods, list | tuple) else [methods]
    return CrossLayerConfig(cross_layer=[entry for entry in entries if entry is not None], **{**SHAPE, **shape})


def build(config: CrossLayerConfig, cls: type[CrossLayerForCausalLM] = CrossLayerForCausalLM) -> CrossLayerForCausalLM:
    """Return a model in float64 with all parameters perturbed, also the ones initialized with zero."""
    torch.manual_seed(0)
    # a copy: transformers writes into the config of a model, such as its attention
    model = cls(copy.deepcopy(config)).double().eval()
    # what is multiplied by a parameter of zero could be wrong, and no comparison would show it
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> Tensor:
    """Return random ids (B, T) without special tokens."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def same(result: Tensor, expected: Tensor, what: str) -> None:
    """Assert that two tensors are equal."""
    assert torch.equal(result, expected), f"{what}: {result.tolist()} is not {expected.tolist()}"


def close(result: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Assert that two tensors differ by less than `tolerance` everywhere."""
    gap = (result - expected).abs().max().item()
    assert gap < tolerance, f"{what}: differs by {gap:.2e}, allowed is {tolerance:.0e}"


def tolerance(config: CrossLayerConfig, float32: float = FLOAT32) -> float:
    """Return the largest allowed difference between two runs of a model; `float32` if it computes partly in float32.

    Capped scores need eager attention, whose softmax is float32 in transformers; linear attention is float32.
    """
    return float32 if config.linear_layers or config.attn_logit_softcapping is not None else TOLERANCE


@torch.no_grad()
def steps(
    model: CrossLayerForCausalLM, ids: Tensor, sizes: Sequence[int], cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """Run ids (B, T) in chunks of `sizes` tokens through a cache; return the logits (B, T, V) and the cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits = [model(chunk, **{CACHE: cache}, use_cache=True).logits for chunk in ids.split(list(sizes), dim=1)]
    return torch.cat(logits, 1), cache


def elements(cache: Cache) -> int:
    """Return the number of elements that a cache has allocated, from its storages."""
    # linear attention's layers hold no keys and values
    layers: Any = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    # the storages, not the shapes: a view of a longer tensor keeps all of it
    states = [state for layer in layers for state in (layer.keys, layer.values) if state is not None]
    return sum(state.untyped_storage().nbytes() // state.element_size() for state in states)


def predicted(config: CrossLayerConfig, batch: int, length: int, windowed: int | None = None) -> int:
    """Return the number of cache elements by the plan, for `batch` rows of `length` tokens.

    `windowed` is the number of tokens in layers with a sliding window, None for all.
    """
    assert config.num_key_value_heads is not None and config.head_dim is not None and config.layer_types is not None
    width = config.num_key_value_heads * config.head_dim
    total = 0
    for layer, layer_type in enumerate(config.layer_types):
        held = min(length, length if windowed is None else windowed) if layer_type == "sliding_attention" else length
        total += held * width * len(config.plan.stored(layer))
    return batch * total

"""Bytes that a cache holds, and models of their default size without memory, on torch's meta device."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from crosslayer.core.transformers_versions import CACHE
from tests.helpers.tiny import BASE

MOST = 9000  # tokens of the longest sequence; beyond most windows
SHORT = (7, 12, 20)  # for models that go through a text token by token
DEFAULT = (7, 300, MOST)
LENGTHS = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "qwen3_next", "zamba"), SHORT),
    **dict.fromkeys(("gpt_neo", "mpt"), (7, 300, 2000)),
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SHRUNK: dict[str, dict] = {  # that cannot run without data
    "jetmoe": {**BASE, "num_key_value_heads": 4, "kv_channels": 8, "num_local_experts": 4},
    "xmod": {**BASE, "default_language": "en_XX", "is_decoder": True},
}
CHANGES: dict[str, dict] = {  # to defaults that describe no model, or none with attention
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 30,
        },
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_budget": 1024, "indexer_compress_ratio": 4, "indexer_head_dim": 256, "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
    },
}  # fmt: skip
CHANGES["qwen4_exp"] = {"text_config": CHANGES["qwen4_exp_text"]}


class Answered(TorchDispatchMode):
    """Answers for tensors without data: a condition holds, a number is 1, and one element is not zero."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        first = arguments[0] if arguments else None
        if isinstance(first, Tensor) and first.is_meta:
            if function is torch.ops.aten._local_scalar_dense.default:
                return 1
            if function is torch.ops.aten.nonzero.default:
                return torch.empty(1, first.dim(), dtype=torch.long, device="meta")
        return function(*arguments, **(options or {}))


def default_config(model_type: str) -> PreTrainedConfig:
    """Return the default config of a model type, as a decoder, with `CHANGES`."""
    config = AutoConfig.for_model(model_type, **CHANGES.get(model_type, SHRUNK.get(model_type, {})))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def lengths_of(model_type: str, config: PreTrainedConfig) -> list[int]:
    """Return three lengths that the model can read."""
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or MOST
    return sorted({max(8, min(length, most - 8)) for length in LENGTHS.get(model_type, DEFAULT)})


def allocated(config: PreTrainedConfig, lengths: list[int]) -> dict[int, int]:
    """Return the bytes of the cache in bfloat16 after a forward pass over each length, 0 without a cache."""
    device = "cpu" if config.model_type in SHRUNK else "meta"
    with torch.device(device), Answered(), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        held = {}
        for length in lengths:
            outputs = model(torch.zeros(1, length, dtype=torch.long), use_cache=True)
            cache = getattr(outputs, CACHE, None)
            held[length] = 0 if cache is None else held_bytes(cache)
    return held


def held_bytes(cache: Any) -> int:
    """Return the bytes of the states in a cache or in one of its layers; a tensor under two names counts once."""
    tensors = {id(tensor): tensor for tensor in _tensors(cache) if tensor.is_floating_point() and tensor.numel() > 1}
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif type(value).__module__.startswith(("transformers.cache_utils", "transformers.models")):
        yield from _tensors({name: one for name, one in vars(value).items() if "config" not in name})

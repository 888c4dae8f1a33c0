"""The components of a model family: norms, MLPs, embeddings and positions, and the model types that convert to it.

A family is an object `FAMILY` in a file of this folder, whose name is the config's `family`; no other file has it. The
defaults are Llama's. Sizes, biases and activations are fields of the config.

Shapes: B batch, T new tokens, C hidden.
"""

import copy
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from crosslayer.core.method import Config

PLAIN_MLP = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
GATED_MLP = {"layers.*.mlp.gate_proj": "colwise", **PLAIN_MLP}
Tables = tuple[Tensor, Tensor]  # cos and sin, (1 or B, T, D) each
ROTATED = ("full_attention", "sliding_attention")  # layer types with rotary positions


@dataclass(frozen=True)
class ModelType:
    """How a Hugging Face config maps to ours; the weights have the same names.

    Attributes:
        copied: attributes with the same name that are copied, in addition to those of all types.
        fixed: values of our attributes that this model type always has.
        renamed: our name of each attribute that has another name there.
    """

    copied: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """The components of a family.

    Attributes:
        norm: the class of norms, called with (size, eps=…).
        gain_offset: a norm multiplies by its weight plus this number.
        post_norms: whether each sublayer's update is normed too.
        mlp: the class of MLPs, called with a config; maps (B, T, C) to (B, T, C).
        mlp_split: the tensor-parallel style of each module of an MLP.
        experts: whether MLPs may be replaced by mixtures of gated MLPs.
        embedding: the class of token embeddings, called with (count, width, padding).
        learned_positions: whether learned position vectors are added to embeddings; otherwise positions are rotary.
        supports: which of "vllm" and "export" the family was tested with; the other refuses it.
        model_types: by `model_type`, Hugging Face's models that convert.
    """

    norm: type[nn.Module] = LlamaRMSNorm
    gain_offset: float = 0.0
    post_norms: bool = False
    mlp: Callable[[Config], nn.Module] = LlamaMLP
    mlp_split: Mapping[str, str] = field(default_factory=lambda: GATED_MLP)
    experts: bool = True
    embedding: type[nn.Embedding] = nn.Embedding
    learned_positions: bool = False
    supports: tuple[str, ...] = ()
    model_types: Mapping[str, ModelType] = field(default_factory=dict)


def norm(config: Config, size: int) -> nn.Module:
    """Return a norm of the family for vectors of a size."""
    return config.components.norm(size, eps=config.rms_norm_eps)


def is_rope_by_type(rope: Mapping[str, Any] | None) -> bool:
    """Return whether `rope_parameters` have an entry for each layer type, instead of one set for all layers."""
    return rope is not None and any(isinstance(rope.get(layer_type), Mapping) for layer_type in ROTATED)


class RotaryByType(nn.ModuleDict):
    """A rotary embedding for each layer type, with the parameters of its entry in `rope_parameters`."""

    def __init__(self, config: Config):
        super().__init__()
        entries: Any = config.rope_parameters
        for layer_type in ROTATED:
            if layer_type in config.layer_types:
                # transformers' class reads one set of parameters from the config
                alone = copy.copy(config)
                alone.rope_parameters = entries[layer_type]
                self[layer_type] = LlamaRotaryEmbedding(config=alone)


def rotary(config: Config) -> LlamaRotaryEmbedding | RotaryByType | None:
    """Return the rotary embedding, or one for each layer type; None if positions are learned."""
    if config.components.learned_positions:
        return None
    return (RotaryByType if is_rope_by_type(config.rope_parameters) else LlamaRotaryEmbedding)(config=config)


def rotary_tables(
    embedding: LlamaRotaryEmbedding | RotaryByType, layer_types: Iterable[str], stream: Tensor, position_ids: Tensor
) -> dict[str, Tables]:
    """Return the tables of each layer type that has rotary positions."""
    present = [layer_type for layer_type in ROTATED if layer_type in layer_types]
    if isinstance(embedding, RotaryByType):
        return {layer_type: embedding[layer_type](stream, position_ids=position_ids) for layer_type in present}
    tables: Tables = embedding(stream, position_ids=position_ids)
    return dict.fromkeys(present, tables)


class PlainMLP(nn.Module):
    """Two linear maps with an activation between them."""

    def __init__(self, config: Config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the update (B, T, C)."""
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


@functools.cache
def family_names() -> tuple[str, ...]:
    """Return the names of the families, which are those of their files."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@functools.cache
def load_family(name: str) -> Family:
    """Return a family by its name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in family_names():
        raise ValueError(f"family must be one of {', '.join(map(repr, family_names()))}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}").FAMILY


def model_types() -> dict[str, tuple[str, ModelType]]:
    """Return the Hugging Face model types that can be converted, each with its family's name."""
    families = {name: load_family(name).model_types for name in family_names()}
    return {key: (name, model_type) for name, types in families.items() for key, model_type in types.items()}

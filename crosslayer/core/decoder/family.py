"""The components of a model family: norms, MLPs, embeddings and positions, and the model types that convert to it.

A family is an object in a file of `families/`, whose name is the config's `family`; the defaults are Llama's. Sizes,
biases and activations are fields of the config.

Shapes: B batch, T new tokens, C hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from crosslayer.core.method import Config

PLAIN_MLP = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
GATED_MLP = {"layers.*.mlp.gate_proj": "colwise", **PLAIN_MLP}


@dataclass(frozen=True)
class ModelType:
    """How a Hugging Face config maps to ours; the weights have the same names.

    Attributes:
        copied: attributes with the same name that are copied, besides those of all types.
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
        supports: which of "pipeline", "vllm" and "export" the family was tested with; the others refuse it.
        model_types: by `model_type`, Hugging Face's models that convert.

    """

    norm: type[nn.Module] = LlamaRMSNorm
    gain_offset: float = 0.0
    post_norms: bool = False
    mlp: Callable[[Config], nn.Module] = LlamaMLP  # pyright: ignore[reportAssignmentType]
    mlp_split: Mapping[str, str] = field(default_factory=lambda: GATED_MLP)
    experts: bool = True
    embedding: type[nn.Embedding] = nn.Embedding
    learned_positions: bool = False
    supports: tuple[str, ...] = ()
    model_types: Mapping[str, ModelType] = field(default_factory=dict)


def norm(config: Config, size: int) -> nn.Module:
    """Return a norm of the family for vectors of a size."""
    return config.components.norm(size, eps=config.rms_norm_eps)


def rotary(config: Config) -> LlamaRotaryEmbedding | None:
    """Return the rotary embedding; None if positions are learned."""
    return None if config.components.learned_positions else LlamaRotaryEmbedding(config=config)


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

"""What the decoder's parts are made of, as the config's `family` says: norms, MLPs, embeddings of tokens and positions.

"llama": RMSNorm, a gated MLP, rotary positions. "gemma2": Gemma's RMSNorm (whose gain is 1 + weight), a further norm
on each sublayer's update, embeddings times √C. "gpt2": LayerNorm, an MLP without a gate, learned positions.

Shapes: B batch, T new tokens, C hidden.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

if TYPE_CHECKING:
    from crosslayer.core.decoder.configuration import CrossLayerConfig

NORMS = {"llama": LlamaRMSNorm, "gemma2": Gemma2RMSNorm, "gpt2": nn.LayerNorm}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def norm(config: "CrossLayerConfig", size: int) -> nn.Module:
    """Return the family's norm of vectors of a size."""
    return NORMS[config.family](size, eps=config.rms_norm_eps)


def mlp(config: "CrossLayerConfig") -> nn.Module:
    """Return the family's MLP, or a mixture of them: from (B, T, C) to (B, T, C), and a router's logits (B·T, E)."""
    if config.num_local_experts is not None:
        from crosslayer.core.decoder.sparse import SparseMLP  # others do without loading it

        return SparseMLP(config)
    return PlainMLP(config) if config.family == "gpt2" else LlamaMLP(config)


def linear_attention(config: "CrossLayerConfig", layer: int) -> nn.Module:
    """Return a layer's linear attention."""
    from crosslayer.core.decoder.linear import LinearAttention  # others do without loading it

    return LinearAttention(config, layer)


def embedding(config: "CrossLayerConfig") -> nn.Embedding:
    """Return the family's embedding of tokens."""
    kind = ScaledEmbedding if config.family == "gemma2" else nn.Embedding
    return kind(config.vocab_size, config.hidden_size, config.pad_token_id)


def learned_positions(config: "CrossLayerConfig") -> nn.Embedding | None:
    """Return the vectors that are added to the embeddings by position; None where positions are rotary."""
    return nn.Embedding(config.max_position_embeddings, config.hidden_size) if config.family == "gpt2" else None


def rotary(config: "CrossLayerConfig") -> LlamaRotaryEmbedding | None:
    """Return the tables of the rotary embedding; None where positions are learned."""
    return None if config.family == "gpt2" else LlamaRotaryEmbedding(config=config)


def initialise(module: nn.Module) -> None:
    """Set first values that differ from what transformers gives a module by default."""
    if isinstance(module, Gemma2RMSNorm):
        init.zeros_(module.weight)


class PlainMLP(nn.Module):
    """Two linear maps with an activation between them."""

    def __init__(self, config: "CrossLayerConfig"):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the update (B, T, C)."""
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class ScaledEmbedding(nn.Embedding):
    """Embeddings times √C, which is rounded to the dtype of the weights, as Gemma was trained."""

    def __init__(self, count: int, width: int, padding: int | None):
        super().__init__(count, width, padding)
        scale = width**0.5
        self.scales = {dtype: torch.tensor(scale, dtype=dtype, device="cpu").item() for dtype in FLOATS}

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled embeddings (B, T, C) of ids (B, T)."""
        return super().forward(input) * self.scales[self.weight.dtype]

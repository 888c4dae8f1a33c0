"""A layer of the decoder: a pure function (stream, carry) → (stream, carry).

A module that a layer does without is None: attention or MLP that a method takes away, with norm and residual; the norm
before attention that reads no input; a residual that is the plain sum; W_c.

Shapes: B batch, T new tokens, C hidden.
"""

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from crosslayer.decoder.attention import CrossLayerAttention
from crosslayer.decoder.configuration import CrossLayerConfig
from crosslayer.method import Carry, Compensation, Residual, Wiring


class CrossLayerDecoderLayer(GradientCheckpointingLayer):
    """A layer; each W_c stands where its update arises: here beside attention or MLP, or within attention."""

    def __init__(self, config: CrossLayerConfig, wiring: Wiring, layer_idx: int):
        super().__init__()
        plan, target, bias = wiring.plan, wiring.compensation[layer_idx], wiring.compensation_bias[layer_idx]
        norm = {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps}
        self.self_attn = CrossLayerAttention(config, wiring, layer_idx) if plan.attends(layer_idx) else None
        self.mlp = LlamaMLP(config) if plan.mlps[layer_idx] is not None else None
        self.post_attention_layernorm = LlamaRMSNorm(**norm) if self.mlp is not None else None
        self.attn_compensation = Compensation(config, target, bias) if target == "attention" else None
        self.mlp_compensation = Compensation(config, target, bias) if target == "mlp" else None
        self.attends = self.self_attn is not None or self.attn_compensation is not None
        self.input_layernorm = LlamaRMSNorm(**norm) if wiring.reads_input[layer_idx] else None
        self.attn_residual = _residual(config, wiring, layer_idx, "attn") if self.attends else None
        self.mlp_residual = _residual(config, wiring, layer_idx, "mlp") if self.mlp is not None else None

    @property
    def compensation(self) -> Compensation | None:
        """The layer's W_c, wherever it stands."""
        if self.attn_compensation is not None:
            return self.attn_compensation
        if self.mlp_compensation is not None:
            return self.mlp_compensation
        return None if self.self_attn is None else self.self_attn.compensation

    def forward(
        self,
        stream: Tensor,
        carry: Carry,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Carry]:
        """Return stream (B, T, C) and carry for the next layer; `carry["read"]` is what the first sublayer read."""
        first, normed = None, None
        if self.attends:
            first, carry = _read(self.attn_residual, stream, carry)
            normed = first if self.input_layernorm is None else self.input_layernorm(first)
            update, carry = self._attention_update(
                normed,
                carry,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            stream, carry = _write(self.attn_residual, stream, update, carry)
        if self.mlp is not None and self.post_attention_layernorm is not None:
            read, carry = _read(self.mlp_residual, stream, carry)
            first = read if first is None else first
            update = self.mlp(self.post_attention_layernorm(read))
            if self.mlp_compensation is not None:
                update = update + self.mlp_compensation(normed)
            stream, carry = _write(self.mlp_residual, stream, update, carry)
        return stream, {**carry, "read": stream if first is None else first}

    def _attention_update(self, normed: Tensor, carry: Carry, **kwargs: Any) -> tuple[Tensor, Carry]:
        """Return attention's update (B, T, C) with that of W_c, which stands alone where attention is gone."""
        if self.self_attn is None:
            assert self.attn_compensation is not None
            return self.attn_compensation(normed), carry
        update, carry = self.self_attn(hidden_states=normed, carry=carry, **kwargs)
        if self.attn_compensation is not None:
            update = update + self.attn_compensation(normed)
        return update, carry


def _residual(config: CrossLayerConfig, wiring: Wiring, layer: int, site: str) -> Residual | None:
    answers = (method.residual(config, wiring, layer, site) for method in wiring.methods)
    return next((residual for residual in answers if residual is not None), None)


def _read(residual: Residual | None, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    return (stream, carry) if residual is None else residual.read(stream, carry)


def _write(residual: Residual | None, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    return (stream + update, carry) if residual is None else residual.write(stream, update, carry)

"""A layer of the decoder: a pure function (stream, carry) → (stream, carry).

A module that a layer does not have is None: dropped attention or MLP, with its norms and residual; the norm before
attention that does not use the layer's input; a residual that is the plain sum; the linear compensation (W_c); norms on
updates, which Gemma 2 has. Norms have the family's names: `post_attention_layernorm` is the norm before Llama's MLP,
but the norm on the update of Gemma 2's attention.

Shapes: B batch, T new tokens, C hidden.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from crosslayer.core.decoder.attention import CrossLayerAttention, Inputs
from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.families import norm
from crosslayer.core.method import Carry, Compensation, Wiring
from crosslayer.core.sources import Sources, outside_layer_graphs
from crosslayer.core.transformers_versions import CACHE, takes_cache

ROUTERS = "routers"  # key in the carry: the logits of all routers so far


class CrossLayerDecoderLayer(GradientCheckpointingLayer):
    """A layer; its W_c is here, parallel to attention or MLP, or inside attention, by its target."""

    def __init__(self, config: CrossLayerConfig, wiring: Wiring, layer_idx: int):
        super().__init__()
        plan, target = wiring.plan, wiring.compensation[layer_idx]
        has_attention, has_mlp = plan.attends(layer_idx) or layer_idx in wiring.linear, plan.mlps[layer_idx] is not None
        self.self_attn = CrossLayerAttention(config, wiring, layer_idx) if plan.attends(layer_idx) else None
        self.linear_attn: nn.Module | None = None
        self.mlp: nn.Module | None = None
        self.post_norms, self.is_sparse = config.components.post_norms, config.num_local_experts is not None
        # blocks imports two of transformers' models, which few decoders need
        if layer_idx in wiring.linear:
            from crosslayer.core.decoder.blocks import LinearAttention

            self.linear_attn = LinearAttention(config, layer_idx)
        if has_mlp and self.is_sparse:
            from crosslayer.core.decoder.blocks import SparseMLP

            self.mlp = SparseMLP(config)
        elif has_mlp:
            self.mlp = config.components.mlp(config)
        width = config.hidden_size
        self.post_attention_layernorm = norm(config, width) if (has_attention if self.post_norms else has_mlp) else None
        self.pre_feedforward_layernorm = norm(config, width) if self.post_norms and has_mlp else None
        self.post_feedforward_layernorm = norm(config, width) if self.post_norms and has_mlp else None
        self.attn_compensation = Compensation(config, target) if target == "attention" else None
        self.mlp_compensation = Compensation(config, target) if target == "mlp" else None
        self.attends = has_attention or self.attn_compensation is not None
        self.input_layernorm = norm(config, width) if wiring.reads_input[layer_idx] else None
        self.attn_residual = wiring.residual(config, layer_idx, "attn") if self.attends else None
        self.mlp_residual = wiring.residual(config, layer_idx, "mlp") if self.mlp is not None else None

    @property
    def compensation(self) -> Compensation | None:
        """The layer's W_c, whatever its target."""
        beside = self.attn_compensation or self.mlp_compensation
        return beside or (None if self.self_attn is None else self.self_attn.compensation)

    @property
    def mlp_norm(self) -> nn.Module | None:
        """The norm before the MLP."""
        return self.pre_feedforward_layernorm if self.post_norms else self.post_attention_layernorm

    @takes_cache
    def forward(
        self,
        stream: Tensor,
        carry: Carry,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Carry]:
        """Return stream and carry for the next layer; the stream is (B, T, C) unless a method changes its shape.

        `carry["read"]` is the input of the first sublayer, (B, T, C); None if the layer has no sublayers.
        """
        first = normed = None
        if self.attends:
            residual, norm, inputs = self.attn_residual, self.input_layernorm, None
            first, carry = (stream, carry) if residual is None else residual(stream, carry)
            normed = first if norm is None else norm(first)
            if residual is not None:
                # where queries, keys and values read what the sublayer reads, its norm is computed once
                q, k, v = residual.inputs(first, carry)
                if norm is not None:
                    q, k, v = (normed if raw is first else norm(raw) for raw in (q, k, v))
                inputs = (q, k, v)
            update, carry = self._attention_update(
                normed,
                carry,
                inputs=inputs,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **{CACHE: cache},
                **kwargs,
            )
            stream, carry = (stream + update, carry) if residual is None else residual(stream, carry, update)

        if self.mlp is not None:
            residual = self.mlp_residual
            read, carry = (stream, carry) if residual is None else residual(stream, carry)
            first = read if first is None else first
            assert self.mlp_norm is not None
            update = self.mlp(self.mlp_norm(read))
            if self.is_sparse:
                update, logits = update
                carry = _with_logits(logits, carry)
            if self.post_feedforward_layernorm is not None:
                update = self.post_feedforward_layernorm(update)
            # its W_c reads what attention read, which the layer has normed already
            if self.mlp_compensation is not None:
                update = update + self.mlp_compensation(normed)
            stream, carry = (stream + update, carry) if residual is None else residual(stream, carry, update)
        return stream, {**carry, "read": first}

    def _attention_update(
        self, normed: Tensor, carry: Carry, inputs: Inputs | None, **kwargs: Any
    ) -> tuple[Tensor, Carry]:
        """Return the update (B, T, C) of attention and W_c, of W_c alone if attention is dropped."""
        beside = None if self.attn_compensation is None else self.attn_compensation(normed)
        if self.self_attn is not None:
            update, carry = self.self_attn(hidden_states=normed, carry=carry, inputs=inputs, **kwargs)
        elif self.linear_attn is not None:
            if inputs is not None and any(each is not normed for each in inputs):
                raise ValueError("linear attention has one input for queries, keys and values; remove the method")
            update = self.linear_attn(normed, kwargs["attention_mask"], kwargs[CACHE])
        else:
            assert beside is not None
            return beside, carry
        if self.post_norms:
            assert self.post_attention_layernorm is not None
            update = self.post_attention_layernorm(update)
        return update if beside is None else update + beside, carry


# as many as there are MLPs below: in a layer's graph their number would compile it again
@outside_layer_graphs
def _with_logits(logits: Tensor, carry: Carry) -> Carry:
    """Append a router's logits (B·T, E) to those of earlier layers in the carry."""
    return {**carry, ROUTERS: carry.get(ROUTERS, Sources()).with_newest(logits)}

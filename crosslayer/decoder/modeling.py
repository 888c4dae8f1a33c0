"""The decoder: Llama whose layers are pure functions (stream, carry) → (stream, carry).

With no method it is Llama, weight names included. What layers lend travels in `carry`, never through the cache.

Shapes: B batch, T new tokens, S cached + new tokens, C hidden, H heads, H_kv key-value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from crosslayer.decoder.caches import check_cache, check_quantized, update_single, without_empty_layers
from crosslayer.decoder.configuration import CrossLayerConfig
from crosslayer.decoder.keywords import LEAKED, LOSS, check_keywords
from crosslayer.environment import check_flex
from crosslayer.method import Carry, Compensation, HeadMixer, Mixing, Residual, Wiring
from crosslayer.plan import STATES

MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class CrossLayerAttention(nn.Module):
    """Attention of one layer; a projection that the plan borrows does not exist."""

    def __init__(self, config: CrossLayerConfig, wiring: Wiring, layer_idx: int):
        super().__init__()
        assert config.num_key_value_heads is not None and config.head_dim is not None
        assert config.layer_types is not None
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.scaling, self.is_causal = config.head_dim, config.head_dim**-0.5, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.attention_dropout = config.attention_dropout or 0.0
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        plan, bias = wiring.plan, config.attention_bias
        self.owns = tuple(plan.sources(state)[layer_idx] == layer_idx for state in STATES)
        self.stored = wiring.stored[layer_idx]
        self.borrows, self.lends = wiring.borrows[layer_idx], wiring.lends[layer_idx]
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        for name, owned, count in zip("qkv", self.owns, heads, strict=True):
            linear = nn.Linear(config.hidden_size, count * self.head_dim, bias=bias) if owned else None
            self.add_module(f"{name}_proj", linear)
        output_bias = bias if config.attention_output_bias is None else config.attention_output_bias
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=output_bias)
        for name, owned in zip("qk", self.owns, strict=False):
            norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if owned and config.qk_norm else None
            self.add_module(f"{name}_norm", norm)
        mixers = [m for method in wiring.methods if (m := method.heads(config, wiring, layer_idx)) is not None]
        self.mixers: Any = nn.ModuleList(mixers) if mixers else ()  # no entry among the modules of a plain layer

    def forward(
        self,
        hidden_states: Tensor,
        carry: Carry,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        past_key_values: Cache | None,
        compensation: Compensation | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Carry]:
        """Return the update (B, T, C) and the carry with what this layer lends; `kwargs` go on to attention."""
        pairs = ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm), (self.v_proj, None))
        states = [self._project(hidden_states, linear, norm) for linear, norm in pairs]  # (B, H or H_kv, T, D)
        states = _rotate(states, position_embeddings)
        mixer: HeadMixer
        for mixer in self.mixers:
            q, k, v = states
            *states, carry = mixer(q, k, v, carry)
        if past_key_values is not None and self.stored:
            states = self._cached(states, past_key_values)
        states = [carry[self.borrows[i]] if state is None else state for i, state in enumerate(states)]
        if self.lends:
            carry = {**carry, **{name: states[i] for i, name in self.lends.items()}}
        kind = self.config._attn_implementation or "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.sliding_window, **kwargs}
        out, _ = attend(self, *states, attention_mask, **options)  # (B, T, H, D)
        for mixer in self.mixers:
            out, carry = mixer.after(out, carry)
        out = out.reshape(*hidden_states.shape[:-1], -1).contiguous()
        if compensation is not None:
            out = out + compensation(hidden_states)
        return self.o_proj(out), carry

    def _project(self, hidden_states: Tensor, linear: Any, norm: Any) -> Tensor | None:
        if linear is None:
            return None
        split = linear(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim)
        return (split if norm is None else norm(split)).transpose(1, 2)

    def _cached(self, states: list[Tensor | None], cache: Cache) -> list[Tensor | None]:
        """Cache what this layer stores."""
        q, k, v = states
        if len(self.stored) == 2:
            return [q, *cache.update(k, v, self.layer_idx)]  # type: ignore[arg-type]
        if self.stored == ("keys",):
            assert k is not None
            return [q, update_single(cache, k, self.layer_idx), v]
        assert v is not None
        return [q, k, update_single(cache, v, self.layer_idx)]


class CrossLayerDecoderLayer(GradientCheckpointingLayer):
    """One layer; a sublayer that the plan drops does not exist, nor do its norm and its residual."""

    def __init__(self, config: CrossLayerConfig, wiring: Wiring, layer_idx: int):
        super().__init__()
        plan = wiring.plan
        self.self_attn = CrossLayerAttention(config, wiring, layer_idx) if plan.attends(layer_idx) else None
        self.mlp = LlamaMLP(config) if plan.mlps[layer_idx] is not None else None
        norm = {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps}
        self.post_attention_layernorm = LlamaRMSNorm(**norm) if self.mlp is not None else None
        self.target = wiring.compensation[layer_idx]
        if self.target is not None:
            self.compensation = Compensation(config, self.target)
        self.attends = self.self_attn is not None or self.target is not None
        # none where all states are borrowed
        self.input_layernorm = LlamaRMSNorm(**norm) if wiring.reads_input[layer_idx] else None
        self.attn_residual = _residual(config, wiring, layer_idx, "attn") if self.attends else None
        self.mlp_residual = _residual(config, wiring, layer_idx, "mlp") if self.mlp is not None else None

    def forward(
        self,
        stream: Tensor,
        carry: Carry,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Carry]:
        """Return stream and carry for the next layer; `carry["read"]` is what the first sublayer read."""
        wc, target = self._modules.get("compensation"), self.target  # an adapter may have wrapped W_c
        read, normed = stream, None
        if self.attends:
            read, carry = self.attn_residual.read(stream, carry) if self.attn_residual is not None else (stream, carry)
            normed = read if self.input_layernorm is None else self.input_layernorm(read)
            update: Any = 0
            if self.self_attn is not None:
                update, carry = self.self_attn(
                    hidden_states=normed,
                    carry=carry,
                    position_embeddings=position_embeddings,
                    attention_mask=attention_mask,
                    past_key_values=past_key_values,
                    compensation=wc if target == "heads" else None,
                    **kwargs,
                )
            if target == "attention":
                update = update + wc(normed)  # type: ignore[misc]
            stream, carry = _write(self.attn_residual, stream, update, carry)
        if self.mlp is not None:
            x, carry = self.mlp_residual.read(stream, carry) if self.mlp_residual is not None else (stream, carry)
            read = read if self.attends else x
            update = self.mlp(self.post_attention_layernorm(x))  # type: ignore[misc]
            if target == "mlp":
                update = update + wc(normed)  # type: ignore[misc]
            stream, carry = _write(self.mlp_residual, stream, update, carry)
        return stream, {**carry, "read": read}


class CrossLayerPreTrainedModel(PreTrainedModel):
    """What the body and the language model have in common."""

    config_class = CrossLayerConfig
    config: CrossLayerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CrossLayerDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Mixing):
            module.reset()
        else:
            super()._init_weights(module)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Turn on checkpointing; the reentrant kind would drop the gradients of what layers lend, silently."""
        options = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError("use_reentrant=True loses the gradients of what layers lend to one another; use False")
        super().activation_checkpointing_enable(options, every_n_layers, offload)


class CrossLayerModel(CrossLayerPreTrainedModel):
    """Embedding, layers, final norm."""

    def __init__(self, config: CrossLayerConfig):
        super().__init__(config)
        kind = config._attn_implementation or "eager"
        if kind not in ALL_MASK_ATTENTION_FUNCTIONS:
            raise ValueError(f"attention {kind!r} has no mask function registered, so it would ignore the causal mask")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        wiring = config.wiring
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([CrossLayerDecoderLayer(config, wiring, i) for i in layers])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        made = [r for method in wiring.methods if (r := method.final(config, wiring)) is not None]
        self.final_residual = made[0] if made else None
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states (B, T, C); with `output_hidden_states`, also what each layer reads."""
        check_keywords(CrossLayerModel.forward, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if kwargs.pop("output_attentions", None) or self.config.output_attentions:
            raise ValueError(
                "maps are not returned, since sharing never builds them; `crosslayer diagnose` measures them"
            )
        stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        check_flex(self.config._attn_implementation, stream.device)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(stream.shape[1], device=stream.device) + seen).unsqueeze(0)
        check_cache(self.config, past_key_values)
        masks = self._masks(stream, attention_mask, past_key_values, position_ids)
        position_embeddings = self.rotary_emb(stream, position_ids=position_ids)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        reads, carry = [], {}
        kinds = self.config.layer_types
        assert kinds is not None
        for layer, kind in zip(self.layers, kinds, strict=True):
            stream, carry = layer(
                stream,
                carry,
                position_embeddings=position_embeddings,
                attention_mask=masks[kind],
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
            if wanted:
                reads.append(carry["read"])
        if self.final_residual is not None:
            stream, carry = self.final_residual.read(stream, carry)
        last = self.norm(stream)
        return BaseModelOutputWithPast(
            last_hidden_state=last,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*reads, last) if wanted else None,
        )

    def _masks(self, stream: Tensor, attention_mask: Any, cache: Cache | None, position_ids: Tensor) -> dict[str, Any]:
        if isinstance(attention_mask, dict):  # made by generate()
            return attention_mask
        return {
            kind: MASKS[kind](
                config=self.config,
                inputs_embeds=stream,
                attention_mask=attention_mask,
                past_key_values=without_empty_layers(cache),
                position_ids=position_ids,
            )
            for kind in dict.fromkeys(self.config.layer_types or ())
        }


class CrossLayerForCausalLM(CrossLayerPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: CrossLayerConfig):
        super().__init__(config)
        self.model = CrossLayerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, T, V), or of the last `logits_to_keep` tokens, and the loss where `labels` are given.

        The loss also takes `shift_labels` (labels that are shifted already; they suffice alone, as where the sequence
        is split over ranks), `ignore_index` and `num_items_in_batch`.
        """
        options = {name: kwargs.pop(name) for name in LOSS if name in kwargs}
        kwargs = {name: value for name, value in kwargs.items() if name not in LEAKED}
        check_keywords(CrossLayerForCausalLM.forward, kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None or options.get("shift_labels") is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        if generation_config.cache_implementation == "quantized":
            check_quantized(self.config)
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)  # type: ignore[misc]


def _residual(config: CrossLayerConfig, wiring: Wiring, layer: int, site: str) -> Residual | None:
    answers = (method.residual(config, wiring, layer, site) for method in wiring.methods)
    return next((residual for residual in answers if residual is not None), None)


def _write(residual: Residual | None, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    return (stream + update, carry) if residual is None else residual.write(stream, update, carry)


def _rotate(states: list[Tensor | None], rotary: tuple[Tensor, Tensor]) -> list[Tensor | None]:
    """Apply rotary embedding to the queries and keys that are there."""
    q, k, v = states
    one, other = q if q is not None else k, k if k is not None else q
    if one is None or other is None:
        return states
    rotated_q, rotated_k = apply_rotary_pos_emb(one, other, *rotary)
    return [None if q is None else rotated_q, None if k is None else rotated_k, v]

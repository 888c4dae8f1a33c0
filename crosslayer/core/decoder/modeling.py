"""The decoder: Llama, or another family, whose layers are pure functions (stream, carry) → (stream, carry).

Without methods it equals that family, weight names included. States that layers share are passed in `carry`, never
through the cache.

Shapes: B batch, T new tokens, C hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    initialization,
)
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from crosslayer.core.checkpointing import NewPreTrainedModel
from crosslayer.core.decoder.caches import check_quantized, fit_cache
from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.families import Tables, norm, rotary, rotary_tables
from crosslayer.core.decoder.keywords import LEAKED, LOSS, check_keywords
from crosslayer.core.decoder.layer import ROUTERS, CrossLayerDecoderLayer
from crosslayer.core.decoder.packed import recurrent_mask
from crosslayer.core.method import Carry, Mixing
from crosslayer.core.sources import BY_LAYER
from crosslayer.core.transformers_versions import CACHE, layers_without_cache, takes_cache

README = (
    "Load this model in Python with `import crosslayer` first: it registers the class with transformers.\n"
    "Then `AutoModelForCausalLM.from_pretrained(FOLDER)` works as for any other model.\n"
)
MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "linear_attention": recurrent_mask,
}
# Tokens whose logits are in memory at a time if they are not returned. In parts by checkpoints, since on a CPU torch's
# linear_cross_entropy with chunks takes 2 to 5 times as long as all logits, and rounds the loss in bfloat16.
AT_ONCE = 2048


class CrossLayerPreTrainedModel(NewPreTrainedModel):
    """The common base class of the body and the language model."""

    config_class = CrossLayerConfig
    config: CrossLayerConfig  # type: ignore[bad-override-mutable-attribute]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CrossLayerDecoderLayer"]
    # accelerate must not copy a cache to each layer's device; it has the second name before transformers 5.24
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with a README that says how to load the model, unless the folder has one.

        A process that has not imported crosslayer would be told to upgrade transformers.
        """
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        readme = Path(save_directory) / "README.md"
        if is_main_process and not readme.exists():
            readme.write_text(README, encoding="utf-8")

    # transformers has a class attribute, and `from_pretrained` reads it for its default; here it depends on the config
    @property
    def _supports_sdpa(self) -> bool:  # type: ignore[override]
        """SDPA cannot cap scores: for such models, as in transformers, eager is the default and `sdpa` is refused."""
        return self.config.attn_logit_softcapping is None

    # transformers' message says that the architecture lacks SDPA, and asks to report it
    def _sdpa_can_dispatch(self, is_init_check: bool = False) -> bool:
        if not self._supports_sdpa:
            raise ValueError("SDPA does not support attn_logit_softcapping; use eager")
        return super()._sdpa_can_dispatch(is_init_check)

    # without it assisted generation would keep rejected tokens in the state of linear attention
    @property
    def _is_stateful(self) -> bool:  # type: ignore[override]
        """Tell `generate` whether layers have a state that cannot be cropped."""
        return bool(self.config.linear_layers)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Mixing):
            module.reset()
        else:
            super()._init_weights(module)
            # transformers sets every norm's weight to 1: Gemma's norms, which add 1, would begin with a gain of 2
            components = self.config.components
            if components.gain_offset and isinstance(module, components.norm):
                initialization.constant_(module.get_parameter("weight"), 1 - components.gain_offset)

    # transformers looks for a decorator in the source of the class's module, and the experts are in `blocks`
    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return that experts may use any of transformers' implementations."""
        return True

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Turn on checkpointing; reentrant checkpointing would silently lose gradients of shared states."""
        options = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError("use_reentrant=True loses the gradients of states that layers share; use False")
        super().activation_checkpointing_enable(options, every_n_layers, offload)


class CrossLayerModel(CrossLayerPreTrainedModel):
    """The embedding, the layers and the final norm."""

    def __init__(self, config: CrossLayerConfig):
        super().__init__(config)
        implementation = config._attn_implementation or "eager"
        # transformers would pass no mask to such a function, without a word
        if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
            raise ValueError(f"attention {implementation!r} has no mask function, so it would not be causal")
        self.embed_tokens = config.components.embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        learned = config.components.learned_positions
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        wiring = config.wiring
        # on the meta device layers take a third less time without initial values
        no_values = torch.get_default_device().type == "meta"
        with initialization.no_init_weights() if no_values else nullcontext():
            layers = [CrossLayerDecoderLayer(config, wiring, layer) for layer in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        # computed here, since compiled code could not ask the config
        self.empty = layers_without_cache(config)
        self.norm, self.rotary_emb = norm(config, config.hidden_size), rotary(config)
        residuals = (method.final(config, wiring) for method in wiring.methods)
        self.final_residual = next((residual for residual in residuals if residual is not None), None)
        for method in wiring.methods:
            method.connect(self)
        self.gradient_checkpointing = False
        self.post_init()

    @takes_cache
    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Return hidden states (B, T, C); with `output_hidden_states`, also the input of each layer.

        With `output_router_logits`, also the logits of every router, (B·T, E) each.
        """
        check_keywords(CrossLayerModel.forward, kwargs)
        with_router_logits = kwargs.pop("output_router_logits", None)
        if with_router_logits is None:
            with_router_logits = self.config.output_router_logits
        elif with_router_logits and self.config.num_local_experts is None:
            raise ValueError("output_router_logits: the model has no router, since num_local_experts is not set")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("the model needs either input_ids or inputs_embeds; pass exactly one")
        if kwargs.pop("output_attentions", None) or self.config.output_attentions:
            raise ValueError("output_attentions is not supported; `crosslayer diagnose` measures attention maps")
        stream: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        # continuous batching has a cache of its own kind, which the attention function reads and writes
        if cache is not None and not isinstance(cache, Cache):
            if self.config.plan.beyond_sharing:
                raise ValueError(f"{self.config.plan.beyond_sharing}, which continuous batching does not support")
            cache, kwargs["paged_cache"] = None, cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            fit_cache(self.config, cache, self.empty)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(stream.shape[1], device=stream.device) + seen).unsqueeze(0)
        layer_types = self.config.layer_types
        assert layer_types is not None
        # a dict if `generate` has built the masks
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = masks_of(self.config, layer_types, stream, attention_mask, position_ids, cache)
        stream, tables = self.add_positions(stream, position_ids)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        # where layers may be compiled one by one, the first finds in the carry what the others find: "read", here a
        # view, since the compiler tells a tensor that comes twice from two tensors
        carry: Carry = {} if torch.compiler.is_compiling() else {BY_LAYER: True, "read": stream.view_as(stream)}
        reads = []
        for layer, layer_type in zip(self.layers, layer_types, strict=True):
            stream, carry = layer(
                stream,
                carry,
                position_embeddings=tables.get(layer_type),
                attention_mask=masks[layer_type],
                position_ids=position_ids,
                **{CACHE: cache},
                use_cache=use_cache,
                **kwargs,
            )
            if output_hidden_states:
                reads.append(carry["read"])
        if self.final_residual is not None:
            stream, carry = self.final_residual(stream, carry)
        last = self.norm(stream)
        named: dict[str, Any] = {CACHE: cache if use_cache else None}
        return MoeModelOutputWithPast(
            last_hidden_state=last,
            **named,
            hidden_states=(*_filled(reads, stream), last) if output_hidden_states else None,
            router_logits=tuple(carry[ROUTERS]) if with_router_logits and ROUTERS in carry else None,
        )

    def add_positions(self, stream: Tensor, position_ids: Tensor) -> tuple[Tensor, Mapping[str, Tables]]:
        """Return embeddings (B, T, C) with learned positions added, or rotary tables by layer type instead."""
        if self.embed_positions is not None:
            positions = self.config.max_position_embeddings
            if stream.shape[1] > positions:
                raise ValueError(f"input is too long: {stream.shape[1]} tokens, the model has {positions} positions")
            return stream + self.embed_positions(position_ids), {}
        assert self.rotary_emb is not None and self.config.layer_types is not None
        return stream, rotary_tables(self.rotary_emb, self.config.layer_types, stream, position_ids)


class CrossLayerForCausalLM(CrossLayerPreTrainedModel, GenerationMixin):
    """The language model: the body and a linear head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: CrossLayerConfig):
        super().__init__(config)
        self.model = CrossLayerModel(config)
        self.vocab_size, self.softcap = config.vocab_size, config.final_logit_softcapping  # type: ignore[bad-override-mutable-attribute]
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Return logits (B, T, V), or those of the last `logits_to_keep` tokens, and the loss if there are `labels`.

        With `skip_logits` only the loss is returned: at most `AT_ONCE` tokens have logits in memory at a time, and the
        backward pass recomputes them.

        The loss also takes `shift_labels` (labels that are shifted already, instead of `labels`, as when the sequence
        is split over ranks), `ignore_index` and `num_items_in_batch`. With `output_router_logits` it contains the
        routers' `aux_loss`, which is returned as well; each of several accumulated batches adds its share of it.
        """
        options = {name: kwargs.pop(name) for name in LOSS if name in kwargs}
        kwargs = {name: value for name, value in kwargs.items() if name not in LEAKED}
        check_keywords(CrossLayerForCausalLM.forward, kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        skip_logits = options.pop("skip_logits", False)
        has_labels = labels is not None or options.get("shift_labels") is not None
        logits = loss = None
        if skip_logits:
            if not has_labels or logits_to_keep != 0:
                raise ValueError("skip_logits returns only the loss: pass labels, and leave out logits_to_keep")
            loss = self._loss_in_chunks(outputs.last_hidden_state, labels, **options)
        else:
            positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self._logits(outputs.last_hidden_state[:, positions, :])
            if has_labels:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        aux_loss = None
        if outputs.router_logits is not None:
            from crosslayer.core.decoder.blocks import balance_loss, share_of_batch  # not loaded for dense models

            aux_loss = balance_loss(self.config, outputs, attention_mask)
            if loss is not None:
                share = share_of_batch(labels, options)
                loss = loss + self.config.router_aux_loss_coef * share * aux_loss
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            router_logits=outputs.router_logits,
        )

    def _logits(self, states: Tensor) -> Tensor:
        logits = self.lm_head(states)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def _loss_in_chunks(
        self,
        states: Tensor,
        labels: Tensor | None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels[:, 1:], (0, 1), value=ignore_index)  # (B, T)
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch

        def loss(states: Tensor, labels: Tensor) -> Tensor:
            options = {"shift_labels": labels, "num_items_in_batch": count, "ignore_index": ignore_index}
            logits = self._logits(states)
            return self.loss_function(logits=logits, labels=None, vocab_size=self.config.vocab_size, **options)

        states, shift_labels = states.flatten(0, 1), shift_labels.flatten()  # (B·T, C), (B·T,)
        total = torch.zeros((), device=states.device)
        for start in range(0, len(states), AT_ONCE):
            chunk = slice(start, start + AT_ONCE)
            total = total + checkpoint(loss, states[chunk], shift_labels[chunk], use_reentrant=False)
        return total

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        if generation_config.cache_implementation == "quantized":
            check_quantized(self.config)
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)  # type: ignore[misc]


class CrossLayerForSequenceClassification(GenericForSequenceClassification, CrossLayerPreTrainedModel):
    """The body with a classifier over the last token that is not padding; loads a language model's weights."""


def masks_of(
    config: CrossLayerConfig,
    layer_types: Sequence[str],
    stream: Tensor,
    mask: Tensor | None,
    position_ids: Tensor,
    cache: Cache | None = None,
) -> dict[str, Any]:
    """Return the mask for each layer type, in the form that the attention implementation needs."""
    # Masks take their size from a layer of the cache. transformers' wrapper for torch.export inserts a layer of length
    # 0 for each one that stores nothing, and a mask of that size would be empty.
    sizes = cache
    if cache is not None and not all(layer.get_max_length() for layer in cache.layers):
        sizes = Cache(layers=[layer for layer in cache.layers if layer.get_max_length()])
    return {
        layer_type: MASKS[layer_type](config, stream, mask, sizes, position_ids=position_ids)
        for layer_type in dict.fromkeys(layer_types)
    }


def _filled(reads: list[Tensor | None], final: Tensor) -> list[Tensor]:
    """Return the input of each layer; for a layer without sublayers, that of the next one, which is the same."""
    filled, following = [], final
    for read in reversed(reads):
        following = following if read is None else read
        filled.append(following)
    return filled[::-1]


AutoModel.register(CrossLayerConfig, CrossLayerModel, exist_ok=True)
AutoModelForCausalLM.register(CrossLayerConfig, CrossLayerForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(CrossLayerConfig, CrossLayerForSequenceClassification, exist_ok=True)

"""See every attention call of a Hugging Face model, and what a probe needs to know of it: layers, positions, token ids.

While a model is watched, the function that its attention implementation names is in transformers' attention
interface behind one that shows the call first. The name stays, since models read it: sparse attention edits its mask
by it. Calls of other models pass through, and everything is put back on exit.

Shapes: B batch, T query tokens, S key tokens, H heads, D head size.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.core.transformers_versions import layers_without_cache

UNREADABLE = "masks of flex attention cannot be read; load the model with sdpa or eager attention"
OVER_DEPTH = "AttentionResidual"  # ends the names of transformers' classes that attend over earlier layers, not tokens


@dataclass(frozen=True)
class AttentionCall:
    """What an attention module hands to its attention function.

    `query` (B, H, T, D), `key` (B, H_kv, S, D) and `value` (B, H_kv, S, D_v) stand after rotary embedding and qk-norm.
    `mask` is the model's own: None (then `causal` decides), boolean (True: may attend) or added to the scores.
    """

    module: nn.Module
    layer: int  # index in the stack of layers
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)
    after: Callable[[Tensor], Tensor] | None = None  # applied to the output (B, T, H, D_v)
    parts: tuple["AttentionCall", ...] = ()  # run instead of this one: calls of some of its queries each, in order

    @property
    def implementation(self) -> str:
        """Name of the attention function."""
        config: Any = self.module.config
        return config._attn_implementation

    @property
    def scaling(self) -> float:
        """Factor on the scores; 1/√D unless the model has its own."""
        own = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if own is None else own

    @property
    def softcap(self) -> float | None:
        """Soft cap c: the scores become c·tanh(scores/c)."""
        return self.options.get("softcap")

    @property
    def sinks(self) -> Tensor | None:
        """Extra logit that takes part in the softmax and has no value: of each head (1, H, 1, 1), or (B, H, T, 1)."""
        by_head, by_token = self.options.get("s_aux"), self.options.get("sinks")
        return by_token if by_head is None else by_head.view(1, -1, 1, 1)

    @property
    def position_bias(self) -> Tensor | None:
        """Term (1 or B, 1 or H, T, S) that the model adds to the scores."""
        return self.options.get("position_bias")

    @property
    def tensor_mask(self) -> Tensor | None:
        """The mask, if it can be read: that of flex attention is a ValueError."""
        if not isinstance(self.mask, Tensor | None):
            raise ValueError(UNREADABLE)
        return self.mask

    @property
    def window(self) -> int | None:
        """Sliding window in tokens, as the model names it."""
        return self.options.get("sliding_window")

    @property
    def causal(self) -> bool:
        """Whether a missing mask means causal: transformers' own rule."""
        of_call = self.options.get("is_causal")
        return getattr(self.module, "is_causal", True) if of_call is None else of_call


Handler = Callable[[AttentionCall], AttentionCall]
# every module in the layers of the models that are watched: its layer, and their handlers, outermost first
_watched: dict[nn.Module, tuple[int, list[Handler]]] = {}
_replaced: dict[str, tuple[int, Callable | None]] = {}  # by name: how many models use it, and the function before


def plan_of(config: PreTrainedConfig) -> DepthPlan | None:
    """Return the plan of one of our own models, from its config."""
    text = config.get_text_config()
    return text.plan if isinstance(text, CrossLayerConfig) else None


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """Return the indices of the layers that have softmax attention, from the config alone."""
    plan, text = plan_of(config), config.get_text_config()
    if plan is not None:
        return [i for i in range(plan.layers) if plan.attends(i)]
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    if not kinds:
        return list(range(text.num_hidden_layers))
    kinds = kinds[: text.num_hidden_layers]
    return [i for i, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind or "hybrid" in kind]


def stored_states(config: PreTrainedConfig, layer: int) -> tuple[str, ...]:
    """Return which of its keys and values a layer keeps in the cache: none where it reuses another's."""
    plan = plan_of(config)
    if plan is not None:
        return plan.stored(layer)
    return () if layer in layers_without_cache(config) else CACHED


def layer_stack(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of Transformer layers: the largest `ModuleList` with `num_hidden_layers` entries.

    Raises:
        ValueError: there is none (where all layers are the same module, say), or the model is an encoder-decoder.
    """
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoders and encoders can be probed")
    count = config.num_hidden_layers
    lists = [m for m in text_model(model).modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of {count} layers, so it cannot be probed; neither can other models "
            "that reuse one layer's weights at every depth (ALBERT) or attend several times in a layer (LongCat-Flash)"
        )
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def no_cache(model: PreTrainedModel) -> dict[str, bool]:
    """Return use_cache=False where the model knows it: packed positions and less memory."""
    return {"use_cache": False} if "use_cache" in model.config.get_text_config().to_dict() else {}


def final_hidden(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Run a model over a sequence (T,) and return the output of its final norm, (T, C)."""
    return model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model)).last_hidden_state[0]


def text_model(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that its text config describes: without a vision tower."""
    config = model.config.get_text_config()
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config), model)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, and every module back into its own afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def intercepted(model: PreTrainedModel, handler: Handler) -> Iterator[None]:
    """Send every attention call inside the stack of layers through `handler` before the model's own function.

    What the handler returns is what the model computes. Contexts nest: the outermost handler comes first, so that
    inner handlers see what it changed. Everything is restored on exit, also after an exception.

    Raises:
        ValueError: the model's attention does not go through the attention interface (Falcon, BLOOM).
    """
    stack = layer_stack(model)
    if stack[0] in _watched:
        _, handlers = _watched[stack[0]]
        handlers.append(handler)
        try:
            yield
        finally:
            handlers.remove(handler)
        return
    name = model.config.get_text_config()._attn_implementation or "eager"
    _check(model, name)
    handlers = [handler]
    modules = {
        module: (layer, handlers)
        for layer, block in enumerate(stack)
        for module in block.modules()
        if not type(module).__name__.endswith(OVER_DEPTH)
    }
    _watched.update(modules)
    _replace(name)
    try:
        yield
    finally:
        _put_back(name)
        for module in modules:
            del _watched[module]


def _check(model: PreTrainedModel, name: str) -> None:
    text = text_model(model)
    if isinstance(text, PreTrainedModel) and not text._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) computes its attention itself, not through "
            "transformers' attention interface, so it cannot be probed"
        )
    if name != "eager" and name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(f"attention {name!r} is not registered with transformers; load the model with sdpa or eager")


def _replace(name: str) -> None:
    """Let an implementation show its calls, unless it does so already."""
    count, before = _replaced.get(name, (0, AttentionInterface._global_mapping.get(name)))
    _replaced[name] = (count + 1, before)
    if count == 0:
        AttentionInterface.register(name, _showing(before))


def _put_back(name: str) -> None:
    count, before = _replaced.pop(name)
    if count > 1:
        _replaced[name] = (count - 1, before)
    elif before is None:
        del AttentionInterface._global_mapping[name]
    else:
        AttentionInterface.register(name, before)


def _showing(before: Callable | None) -> Callable:
    """Return an attention function that shows the calls of watched modules to their handlers."""

    def attend(module, query, key, value, attention_mask, **options):
        function = _eager(module) if before is None else before
        if module not in _watched:  # of another model, or of a vision tower
            return function(module, query, key, value, attention_mask, **options)
        layer, handlers = _watched[module]
        call = AttentionCall(module, layer, query, key, value, attention_mask, options)
        for handler in handlers:
            seen = call
            call = handler(seen)
            if seen.parts and call is not seen:
                raise ValueError("an attention call was changed after it had been divided; enter `smaller_cache` last")
        outputs = [
            function(module, part.query, part.key, part.value, part.mask, **part.options)
            for part in call.parts or (call,)
        ]
        out, *more = outputs[0] if len(outputs) == 1 else (torch.cat([out for out, *_ in outputs], 1), None)
        return out if call.after is None else call.after(out), *more

    return attend


def _eager(module: nn.Module) -> Callable:
    """Return the eager function of a module: each modeling file has its own."""
    for cls in type(module).__mro__:
        function = vars(sys.modules[cls.__module__]).get("eager_attention_forward")
        if function is not None:
            return function
    raise ValueError(f"{type(module).__name__} has no eager attention function to delegate to; load it with sdpa")


@contextmanager
def visited(model: PreTrainedModel, see: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Show every attention call to `see`, outputs unchanged.

    Raises:
        ValueError: on a clean exit, if a layer that has attention was not visited.
    """
    seen: set[int] = set()

    def handler(call: AttentionCall) -> AttentionCall:
        seen.add(call.layer)
        see(call)
        return call

    if not attention_layers(model.config):
        raise ValueError(f"{type(model).__name__} ({model.config.model_type}) has no softmax attention to measure")
    with intercepted(model, handler):
        yield
    missing = [layer for layer in attention_layers(model.config) if layer not in seen]
    if missing:
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}): no attention call was seen in layers {missing}, "
            "so it cannot be probed"
        )


def position_embedding(model: PreTrainedModel) -> tuple[str, nn.Embedding] | None:
    """Return name and module of the text model's learned position table, known by its name (BERT, GPT-2, OPT)."""
    for name, module in text_model(model).named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            return name, module
    return None


def config_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a config names, if any."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has, if any limit; rows of the table for padding (RoBERTa) do not count."""
    limit = config_positions(model.config)
    embedding = position_embedding(model)
    if embedding is None:
        return limit
    _, table = embedding
    if table.padding_idx is None:
        return limit
    rows = table.num_embeddings - table.padding_idx - 1
    return rows if limit is None else min(limit, rows)


def positions(model: PreTrainedModel) -> int:
    """Return how many positions a model has; far more than enough where its config names no limit."""
    return position_limit(model) or 2**31


def check_ids(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse token ids that a model cannot take.

    Raises:
        ValueError: `ids` are no integers (B ≥ 1, T ≥ 2), not in the vocabulary, or more than the model's positions; or
            the model has flex attention, whose masks cannot be read and would take long to compile.
    """
    if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2 or ids.is_floating_point():
        raise ValueError(f"ids must be integers (B ≥ 1, T ≥ 2), got {ids.dtype} of shape {tuple(ids.shape)}")
    config = model.config.get_text_config()
    check_length(model, ids.shape[1])
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(
            f"token ids must be below the vocabulary's size, {config.vocab_size}, got {int(ids.min())} to "
            f"{int(ids.max())}; use this model's tokenizer"
        )
    if config._attn_implementation == "flex_attention":
        raise ValueError(UNREADABLE)


def check_length(model: PreTrainedModel, length: int) -> None:
    """Refuse sequences of more tokens than the model has positions, by a ValueError."""
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise ValueError(f"length {length} is above the model's {limit} positions")

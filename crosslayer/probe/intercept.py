"""See every attention call of a Hugging Face model, and change it.

While a model is watched, the function that its attention implementation names is in transformers' attention
interface behind one that shows the call first. The name stays, since models read it: under a name of the probe's own,
models with a sparse choice of tokens (HY-V4, Mistral Large 4, DeepSeek-V3.2) silently ran dense. Calls of other models
pass through, and everything is put back on exit.

Shapes: B batch, T query tokens, S key tokens, H heads, D head size.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from crosslayer.probe.model import NO_MASKS, attention_layers, layer_stack, text_model

EAGER = "eager_attention_forward"  # the function's name in transformers' modeling files
# Ends the names of transformers' classes that attend over earlier layers, not tokens: their calls have no maps.
OVER_DEPTH = "AttentionResidual"


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
        given = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if given is None else given

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
        """The mask, if it can be read: documents of packed rows are a ValueError."""
        if not isinstance(self.mask, Tensor | None):
            raise ValueError(NO_MASKS.format(self.implementation))
        return self.mask

    @property
    def window(self) -> int | None:
        """Sliding window in tokens, as the model names it."""
        return self.options.get("sliding_window")

    @property
    def causal(self) -> bool:
        """Whether a missing mask means causal: transformers' own rule."""
        of_call = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if of_call is None else of_call)


Handler = Callable[[AttentionCall], AttentionCall]
# every module in the layers of the models that are watched: its layer, and their handlers, outermost first
_watched: dict[nn.Module, tuple[int, list[Handler]]] = {}
_replaced: dict[str, tuple[int, Callable | None]] = {}  # by name: how many models use it, and the function before


@contextmanager
def intercepted(model: PreTrainedModel, handler: Handler) -> Iterator[None]:
    """Send every attention call inside the stack of layers through `handler` before the model's own function.

    What the handler returns is what the model computes. Contexts nest: the outermost handler comes first, so that
    inner handlers see what it changed. Everything is restored on exit, also after an exception.

    Raises:
        ValueError: the model's attention does not go through the attention interface (Falcon, BLOOM).
    """
    stack = layer_stack(model)
    # A context within another one of the same model adds its handler behind the outer ones.
    if stack[0] in _watched:
        _, handlers = _watched[stack[0]]
        handlers.append(handler)
        try:
            yield
        finally:
            handlers.remove(handler)
        return

    # A model that computes attention by itself would run, and none of its calls would be seen.
    text = text_model(model)
    if isinstance(text, PreTrainedModel) and not text._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) computes its attention itself, not through "
            "transformers' attention interface, so it cannot be probed"
        )
    name = model.config.get_text_config()._attn_implementation or "eager"
    if name != "eager" and name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(f"attention {name!r} is not registered with transformers; load the model with sdpa or eager")

    handlers = [handler]
    modules = {
        module: (layer, handlers)
        for layer, block in enumerate(stack)
        for module in block.modules()
        if not type(module).__name__.endswith(OVER_DEPTH)
    }
    _watched.update(modules)
    # The first model of an implementation puts ours in its place, the last one puts the old one back.
    users, before = _replaced.get(name, (0, AttentionInterface._global_mapping.get(name)))
    _replaced[name] = (users + 1, before)
    if users == 0:
        AttentionInterface.register(name, partial(_attend, before))
    try:
        yield
    finally:
        users, before = _replaced.pop(name)
        if users > 1:
            _replaced[name] = (users - 1, before)
        elif before is None:
            del AttentionInterface._global_mapping[name]
        else:
            AttentionInterface.register(name, before)
        for module in modules:
            del _watched[module]


def _attend(before: Callable | None, module, query, key, value, attention_mask, **options):
    """Show a call of a watched module to its handlers, then compute what they made of it by the function `before`."""
    function = before
    if function is None:
        # eager attention is no entry of the interface: each modeling file has its own
        files = (vars(sys.modules[cls.__module__]) for cls in type(module).__mro__)
        function = next((file[EAGER] for file in files if file.get(EAGER) is not None), None)
        if function is None:
            raise ValueError(
                f"{type(module).__name__} has no eager attention function to delegate to; load it with sdpa"
            )
    if module not in _watched:  # of another model, or of a vision tower
        return function(module, query, key, value, attention_mask, **options)
    layer, handlers = _watched[module]
    call = AttentionCall(module, layer, query, key, value, attention_mask, options)
    for handler in handlers:
        seen = call
        call = handler(seen)
        # the parts are what runs, so that a change of the whole call would have no effect
        if seen.parts and call is not seen:
            raise ValueError("an attention call was changed after it had been divided; enter `smaller_cache` last")
    outputs = [
        function(module, part.query, part.key, part.value, part.mask, **part.options) for part in call.parts or (call,)
    ]
    out, *more = outputs[0] if len(outputs) == 1 else (torch.cat([out for out, *_ in outputs], 1), None)
    return out if call.after is None else call.after(out), *more


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

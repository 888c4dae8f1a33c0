"""See every attention call of a Hugging Face model, with its outputs left as they are.

A function and its mask function are registered with transformers' attention interface under a name of their own,
delegate to the implementation that the model had, and are removed on exit.

Shapes: B batch, T query tokens, S key tokens, H heads, D head size.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from crosslayer.environment import quiet_transformers
from crosslayer.plan import CACHED

PREFIX = "crosslayer_"


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

    @property
    def implementation(self) -> str:
        """Name of the attention function; while it is intercepted, ours around the model's own."""
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
        """Learned extra logit of each head (H,) that takes part in the softmax and has no value (gpt-oss)."""
        return self.options.get("s_aux")

    @property
    def position_bias(self) -> Tensor | None:
        """Term (1 or B, 1 or H, T, S) that the model adds to the scores."""
        return self.options.get("position_bias")

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
_handlers: dict[str, list[Handler]] = {}  # registered name -> handlers, outermost first


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """Return the indices of the layers that have softmax attention, from the config alone."""
    text = config.get_text_config()
    plan = getattr(text, "plan", None)  # of our own models
    if plan is not None:
        return [i for i in range(plan.layers) if plan.attends(i)]
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    if not kinds:
        return list(range(text.num_hidden_layers))
    kinds = kinds[: text.num_hidden_layers]
    return [i for i, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind or kind == "hybrid"]


def stored_shares(config: PreTrainedConfig, layer: int) -> dict[str, float]:
    """Return which share of its full keys and values a layer keeps in the cache: 0 where it reuses another's."""
    plan = getattr(config, "plan", None)
    if plan is not None:
        return {state: plan.stored_share(state, layer) for state in CACHED}
    modes = getattr(config, "kv_sharing_modes", None)
    reuses = bool(modes) and modes[layer] not in (None, "store")
    return dict.fromkeys(CACHED, 0.0 if reuses else 1.0)


def read_counts(config: PreTrainedConfig, layer: int) -> dict[str, int]:
    """Return how many layers' keys and values attention of a layer reads: 1, unless a plan names several."""
    plan = getattr(config, "plan", None)
    return dict.fromkeys(CACHED, 1) if plan is None else {state: plan.read_count(state, layer) for state in CACHED}


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
            f"{type(model).__name__} holds no list of {count} layers, so they cannot be probed; models that use one "
            "layer's weights at every depth, as ALBERT does, have none"
        )
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def no_cache(model: PreTrainedModel) -> dict[str, bool]:
    """Return use_cache=False where the model knows it: packed positions and less memory."""
    return {"use_cache": False} if "use_cache" in model.config.get_text_config().to_dict() else {}


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
    current = model.config.get_text_config()._attn_implementation or "eager"
    if current in _handlers:
        handlers = _handlers[current]
        handlers.append(handler)
        try:
            yield
        finally:
            handlers.remove(handler)
        return
    name = f"{PREFIX}{current}_{id(model):x}"
    configs = _configs(model)
    before = [config._attn_implementation_internal for config in configs]
    attend = _dispatch(name, current, _owners(model))  # refuses what cannot be probed, before anything is registered
    try:
        _handlers[name] = [handler]
        AttentionInterface.register(name, attend)
        if current in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[current])
        with quiet_transformers():
            model.set_attn_implementation(name)
        if model.config.get_text_config()._attn_implementation != name:
            raise ValueError(
                f"{type(model).__name__} ({model.config.model_type}) computes its attention itself, not through "
                "transformers' attention interface, so it cannot be probed"
            )
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
        del _handlers[name]


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
        raise ValueError(f"{type(model).__name__} ({model.config.model_type}) has no softmax attention to look at")
    with intercepted(model, handler):
        yield
    missing = [layer for layer in attention_layers(model.config) if layer not in seen]
    if missing:
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}): no attention call was seen in layers {missing}, "
            "so it cannot be probed"
        )


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return every config whose attention implementation `set_attn_implementation` may change."""
    configs: dict[int, PreTrainedConfig] = {}
    waiting = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            waiting += [getattr(config, key) for key in config.sub_configs]
    return list(configs.values())


def _owners(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Return the layer of every module inside the stack."""
    return {module: i for i, layer in enumerate(layer_stack(model)) for module in layer.modules()}


def _dispatch(name: str, base: str, owners: dict[nn.Module, int]) -> Callable:
    """Return the attention function that is registered as `name`."""

    def attend(module, query, key, value, attention_mask, **options):
        function = _function(base, module)
        if module not in owners:  # a vision tower, say
            return function(module, query, key, value, attention_mask, **options)
        call = AttentionCall(module, owners[module], query, key, value, attention_mask, options)
        for handler in _handlers[name]:
            call = handler(call)
        return function(module, call.query, call.key, call.value, call.mask, **call.options)

    return attend


def _function(base: str, module: nn.Module) -> Callable:
    """Return the function that the model would have used; eager is each modeling file's own."""
    if base in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[base]
    for cls in type(module).__mro__:
        function = vars(sys.modules[cls.__module__]).get("eager_attention_forward")
        if function is not None:
            return function
    raise ValueError(f"{type(module).__name__} has no eager attention function to delegate to; load it with sdpa")

"""The config of the cross-layer decoder: Llama's fields, those of other families, and a list of methods."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlamaConfig

from crosslayer.core.decoder.families import ROTATED, Family, is_rope_by_type, load_family
from crosslayer.core.decoder.parallel import tensor_parallel_plan
from crosslayer.core.method import Method, Wiring
from crosslayer.core.methods import load_method, mixes, state_reader, to_entry, wire
from crosslayer.core.plan import CACHED, PASSED, STATES, DepthPlan

LAYER_TYPES = (*ROTATED, "linear_attention")


@strict
class CrossLayerConfig(LlamaConfig):
    """The config of a decoder with `cross_layer`, a method or a list of methods; empty means a plain decoder.

    Each method is a name, {"name": …, option: …}, a `Method` or a `Method` class; they are stored as plain data.

    Fields that Llama's config does not have:

    - `family`: the classes of norms, MLPs, embeddings and positions, a file of decoder/families; sizes, biases and
      activations are separate fields.
    - `qk_norm` (Qwen3), `attention_output_bias` (None: as `attention_bias`; Qwen2 has False).
    - `sliding_window` with `layer_types`.
    - `rope_parameters` are Llama's, or have an entry with such parameters for each of `layer_types` (Gemma 3).
    - "linear_attention" among `layer_types` is Kimi Linear's block, with `linear_num_heads` of `linear_head_dim` and a
      convolution over `linear_conv_kernel_dim` tokens. Methods cannot share the state of such a layer.
    - `query_pre_attn_scalar`: scores are divided by its root; None: the head size.
    - `attn_logit_softcapping`, `final_logit_softcapping`: c of c·tanh(x / c), for scores and for logits; None: no cap.
      SDPA cannot cap scores, so eager attention is the default then.
    - `num_local_experts`: replaces each MLP by a mixture of that many experts (Mixtral); `num_experts_per_tok` of them
      process a token. With `output_router_logits` the loss includes the balance loss times `router_aux_loss_coef`.

    Raises:
        ValueError: a method, an option or their combination is impossible.
    """

    model_type = "crosslayer"
    router_jitter_noise = 0.0  # read by transformers' sparse block
    base_model_pp_plan = None  # transformers' pipelines cannot pass shared states between stages

    cross_layer: Any = None
    qk_norm: bool = False
    attention_output_bias: bool | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    family: str = "llama"
    query_pre_attn_scalar: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False
    linear_num_heads: int | None = None
    linear_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4

    def __post_init__(self, **kwargs: Any):
        width, heads = self.hidden_size, self.num_attention_heads
        if self.head_dim is None and width % heads:
            raise ValueError(f"hidden_size = {width} is not a multiple of num_attention_heads = {heads}; set head_dim")
        entries = self.cross_layer if isinstance(self.cross_layer, list | tuple) else [self.cross_layer]
        self.cross_layer = [to_entry(load_method(entry)) for entry in entries if entry is not None]

        # a method may define them
        for method in self.methods:
            windows = method.windows(self.num_hidden_layers)
            if windows is None:
                continue
            layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]
            (width,) = {window for window in windows if window is not None}
            if self.layer_types not in (None, layer_types) or self.sliding_window not in (None, width):
                raise ValueError(
                    f"{method.name()} sets layer_types and sliding_window = {width} itself; remove layer_types = "
                    f"{self.layer_types} and sliding_window = {self.sliding_window} from the config"
                )
            self.layer_types, self.sliding_window = layer_types, width
        if self.layer_types is None:
            layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [layer_type] * self.num_hidden_layers

        super().__post_init__(**kwargs)
        self._check_family()
        self._check_layers()
        self._check_methods()

    # transformers calls it by name, from a check of every config
    def validate_architecture(self) -> None:
        """Allow any head size; Llama's config requires hidden_size / num_attention_heads."""

    @property
    def methods(self) -> list[Method]:
        """The methods, in list order."""
        assert isinstance(self.cross_layer, list)
        return [load_method(entry) for entry in self.cross_layer]

    @property
    def components(self) -> Family:
        """The component classes of the family."""
        return load_family(self.family)

    @property
    def wiring(self) -> Wiring:
        """The combined wiring of the methods, computed once per process for equal methods and layers."""
        return wire(self.methods, self.num_hidden_layers, self.linear_layers)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers with linear attention."""
        return tuple(
            layer for layer, layer_type in enumerate(self.layer_types or ()) if layer_type == "linear_attention"
        )

    @property
    def plan(self) -> DepthPlan:
        """Which layer reads which states, all methods merged."""
        return self.wiring.plan

    # A property, since with an own value in `layer_types` instead transformers would refuse to save the config.
    @property
    def kv_sharing_modes(self) -> list[str | None]:
        """The field that transformers' caches read: "reuse" for layers that store nothing, "store" for sources."""
        wiring, modes = self.wiring, []
        for layer, carried in enumerate(wiring.carried):
            shares_cached = any(PASSED[index] in CACHED for index in carried)
            has_state = wiring.plan.stored(layer) or layer in wiring.linear
            modes.append("reuse" if not has_state else "store" if shares_cached else None)
        return modes

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]
        """How transformers shards the modules over ranks (tensor parallelism)."""
        return tensor_parallel_plan(self, self.wiring)

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]) -> None:
        """Ignore assignments: transformers before 5.21 would add the embedding, which is included already."""

    def _check_family(self) -> None:
        family = self.components
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            value = vars(self)[name]
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0 or None, got {value}")
        experts, used = self.num_local_experts, self.num_experts_per_tok
        if experts is not None and not 1 <= used <= experts:
            raise ValueError(f"num_experts_per_tok must be 1 to num_local_experts = {experts}, got {used}")
        # Mixtral's experts are gated and have no biases
        if experts is not None and (self.mlp_bias or not family.experts):
            raise ValueError(
                "num_local_experts needs a family with gated MLPs and mlp_bias = False, got family = "
                f"{self.family!r}, mlp_bias = {self.mlp_bias}"
            )
        if self.output_router_logits and experts is None:
            raise ValueError("output_router_logits needs routers; set num_local_experts")
        if family.learned_positions and self.rope_parameters != LlamaConfig().rope_parameters:
            raise ValueError(f"family {self.family!r} has learned positions; leave rope_parameters out")

    def _check_layers(self) -> None:
        """Refuse heads that do not fit, and layer types that lack something."""
        heads, pairs, layer_types = self.num_attention_heads, self.num_key_value_heads, self.layer_types
        assert pairs is not None and layer_types is not None
        if heads % pairs:
            raise ValueError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {pairs}")
        if len(layer_types) != self.num_hidden_layers or not set(layer_types) <= set(LAYER_TYPES):
            raise ValueError(
                f"layer_types must have {self.num_hidden_layers} entries, each one of {', '.join(LAYER_TYPES)}, got "
                f"{len(layer_types)} entries of {sorted(set(layer_types))}"
            )
        if self.linear_layers and (self.linear_num_heads is None or self.linear_head_dim is None):
            raise ValueError("linear_attention in layer_types needs linear_num_heads and linear_head_dim; set both")
        if "sliding_attention" in layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, but sliding_window is not set; set it")
        rope = self.rope_parameters
        assert rope is not None
        # one set of parameters for all layers is Llama's, which transformers has checked
        if not is_rope_by_type(rope):
            return
        needed = {layer_type for layer_type in ROTATED if layer_type in layer_types}
        entries = {name for name, value in rope.items() if name in ROTATED and isinstance(value, Mapping)}
        if not needed <= entries or entries != set(rope):
            raise ValueError(
                f"rope_parameters by layer type must have an entry for each of {', '.join(sorted(needed))} and nothing "
                f"else, got {rope}"
            )

    def _check_methods(self) -> None:
        """Refuse methods that do not fit the config or one another; name the fewest that do not."""
        with contextlib.suppress(ValueError):
            self._check_wiring(self.methods)
            return
        # the fewest first, so that the message is about the methods that cause it
        for count in range(len(self.methods) + 1):
            for few in combinations(self.methods, count):
                try:
                    self._check_wiring(few)
                except ValueError as error:
                    misfit, names = str(error), [method.name() for method in few]
                    is_named = all(re.search(rf"\b{re.escape(name)}\b", misfit) for name in names)
                    raise ValueError(misfit if is_named else f"{' with '.join(names)}: {misfit}") from None

    def _check_wiring(self, methods: Sequence[Method]) -> None:
        """Refuse methods, some of the config's, whose layers cannot read from one another or whose modules refuse."""
        left_out = [method for method in self.methods if method not in methods]
        # the config's layer types may come from a method that is left out here
        plain = any(method.windows(self.num_hidden_layers) is not None for method in left_out)
        layer_types = ["full_attention"] * self.num_hidden_layers if plain else self.layer_types
        assert layer_types is not None
        wiring = wire(methods, self.num_hidden_layers, self.linear_layers)
        plan = wiring.plan
        for state in STATES:
            for reader in range(self.num_hidden_layers):
                for source in plan.reads(state, reader):
                    if layer_types[reader] != layer_types[source]:
                        pair = f"layer {reader} ({layer_types[reader]}) reads {state} of layer {source}"
                        raise ValueError(f"{pair} ({layer_types[source]}); layers of different types cannot share")
        for layer in filter(plan.involves_choice, range(plan.layers)):
            if layer_types[layer] != "full_attention":
                raise ValueError(f"layer {layer} ({layer_types[layer]}): chosen tokens need full causal attention")
            # built without a use for it, since it refuses bad options
            for method in wiring.methods:
                method.choice(self, wiring, layer)
            if wiring.reads_several[layer]:
                raise ValueError(f"layer {layer} reads several layers, so it can neither choose nor attend to a choice")
        if sum(type(method).residual is not Method.residual for method in wiring.methods) > 1:
            raise ValueError("both replace the residual stream; only one method may")
        names = [method.name() for method in wiring.methods]
        if len(set(names)) != len(names):
            raise ValueError(f"cross_layer must name each method once, got {', '.join(names)}")

        # modules are built without memory, so that they refuse bad options before a model is built
        with torch.device("meta"):
            for method in filter(mixes, wiring.methods):
                for layer in range(self.num_hidden_layers):
                    if wiring.plan.attends(layer):
                        method.heads(self, wiring, layer)
                for layer, site in wiring.sublayers:
                    method.residual(self, wiring, layer, site)
                method.final(self, wiring)
            for layer in range(self.num_hidden_layers):
                if wiring.reads_several[layer]:
                    state_reader(self, wiring, layer)


AutoConfig.register("crosslayer", CrossLayerConfig, exist_ok=True)

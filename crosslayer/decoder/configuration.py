"""The config of the cross-layer decoder: Llama's, what Mistral, Qwen2 and Qwen3 differ in, and a list of methods."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from crosslayer.decoder.parallel import tensor_parallel_plan
from crosslayer.method import Method, load_method, merge_plans, to_entry
from crosslayer.plan import STATES, DepthPlan

LAYER_TYPES = ("full_attention", "sliding_attention")


@strict
class CrossLayerConfig(LlamaConfig):
    """`cross_layer` is a method or a list of methods; empty means Llama.

    Each is a name, {"name": …, option: …}, a `Method` or a class of them; they are kept as plain data.

    Beside Llama's fields: `qk_norm` (Qwen3), `attention_output_bias` (None: as `attention_bias`; Qwen2 has False),
    `sliding_window` with `layer_types`.

    Raises:
        ValueError: a method, an option or the wiring is impossible; the message says what would be right.

    """

    model_type = "crosslayer"
    base_model_pp_plan = None  # what layers lend does not travel between the stages of a pipeline

    cross_layer: Any = None
    qk_norm: bool = False
    attention_output_bias: bool | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any):
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                f"{self.num_attention_heads}; set head_dim"
            )
        given = self.cross_layer if isinstance(self.cross_layer, list | tuple) else [self.cross_layer]
        self.cross_layer = [to_entry(load_method(entry)) for entry in given if entry is not None]
        super().__post_init__(**kwargs)
        self._check_shapes()
        self._check_wiring()

    def validate_architecture(self) -> None:
        """Allow any head size that is given: Llama's config insists on hidden_size / num_attention_heads."""

    @property
    def methods(self) -> list[Method]:
        """The methods, in list order."""
        assert isinstance(self.cross_layer, list)
        return [load_method(entry) for entry in self.cross_layer]

    @property
    def plan(self) -> DepthPlan:
        """Who owns and who reads, all methods merged."""
        return merge_plans(self.methods, self.num_hidden_layers)

    @property
    def sublayers(self) -> list[tuple[int, str]]:
        """The sublayers that exist, in order: (layer, "attn" or "mlp"); W_c alone is an "attn" too."""
        plan, found = self.plan, []
        for i in range(self.num_hidden_layers):
            found += [(i, "attn")] if plan.attends(i) or self.compensation(i) is not None else []
            found += [(i, "mlp")] if plan.mlps[i] is not None else []
        return found

    def compensation(self, layer: int) -> str | None:
        """Return where W_c of a layer writes, None if it has none.

        What compensates for borrowing goes with an attention that another method drops.
        """
        plan, count = self.plan, self.num_hidden_layers
        made = [
            (m.name(), m.compensate(count, layer))
            for m in self.methods
            if m.plan(count).attends(layer) == plan.attends(layer)
        ]
        found = [(name, target) for name, target in made if target is not None]
        if len(found) > 1:
            raise ValueError(f"layer {layer}: {' and '.join(n for n, _ in found)} both compensate it; only one may")
        if not found:
            return None
        if found[0][1] == "mlp" and plan.mlps[layer] is None:
            raise ValueError(f"layer {layer}: {found[0][0]} compensates on the MLP's update, but the MLP is dropped")
        return found[0][1]

    def reads_input(self, layer: int) -> bool:
        """Return whether attention of a layer reads its own input: it owns a state, or something compensates it."""
        owns = any(self.plan.sources(state)[layer] == layer for state in STATES)
        return owns or self.compensation(layer) is not None

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        """What transformers' caches read: "reuse" for layers that store nothing, "store" for lenders."""
        plan = self.plan
        return [
            "reuse" if not plan.stored(i) else "store" if any(plan.lends(s, i) for s in ("keys", "values")) else None
            for i in range(self.num_hidden_layers)
        ]

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]
        """How transformers splits the modules over ranks (tensor parallelism)."""
        mixes = any(type(method).heads is not Method.heads for method in self.methods)
        compensates = any(self.compensation(layer) is not None for layer in range(self.num_hidden_layers))
        return tensor_parallel_plan(self.qk_norm, mixes, compensates)

    def _check_shapes(self) -> None:
        assert self.num_key_value_heads is not None and self.layer_types is not None
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= set(LAYER_TYPES):
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries {sorted(set(self.layer_types))}; it needs "
                f"{self.num_hidden_layers}, each one of {', '.join(LAYER_TYPES)}"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, but sliding_window is not set")

    def _check_wiring(self) -> None:
        plan, methods, kinds = self.plan, self.methods, self.layer_types
        assert kinds is not None
        for state in STATES:
            for reader, source in enumerate(plan.sources(state)):
                if source is not None and kinds[reader] != kinds[source]:
                    raise ValueError(
                        f"layer {reader} ({kinds[reader]}) reads {state} of layer {source} ({kinds[source]}); "
                        "layers with different masks cannot share"
                    )
        by_residual = [m.name() for m in methods if type(m).residual is not Method.residual]
        if len(by_residual) > 1:
            raise ValueError(f"{' and '.join(by_residual)} both replace the residual stream; only one method may")
        names = [m.name() for m in methods]
        if len(set(names)) != len(names):
            raise ValueError(f"cross_layer names a method twice: {', '.join(names)}")
        for method in methods:  # a mixer that acts nowhere, a block that is too large: said now, not in the model
            for layer in range(self.num_hidden_layers):
                self.compensation(layer)
                if plan.attends(layer):
                    method.heads(self, layer)
                    method.residual(self, layer, "attn")
            method.final(self)

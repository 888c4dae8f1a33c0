"""Pretend to share: what a wiring would do to a model that is left as it is.

Queries, keys and values of other layers are put into the attention calls of the unmodified model, and dropped
sublayers add nothing. Weights that a retrofit merges or adds (W_c) are outside of it.

Flows: states of the sources, within a forward pass. Reads: every reader. Cache: unchanged, nothing is saved.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.checkpointing import is_checkpointing
from crosslayer.core.choice import TokenChoice, mask_of
from crosslayer.core.method import Method
from crosslayer.core.methods import Entry, load_methods, merge_plans, mixes, wire
from crosslayer.core.plan import PASSED, STATES, DepthPlan
from crosslayer.probe.intercept import AttentionCall, intercepted, visited
from crosslayer.probe.model import layer_stack, no_cache, plan_of, unwrapped
from crosslayer.probe.shapes import LayerShape, may_share
from crosslayer.probe.stream import LayerStream, streams

Wish = DepthPlan | Entry | Sequence[Entry]

FIELDS = {"queries": "query", "keys": "key", "values": "value"}
CHECKPOINTED = (
    "a what-if cannot train with activation checkpointing, since other layers' states are freed before a layer is "
    "computed again; turn it off: model.activation_checkpointing_disable()"
)


@dataclasses.dataclass(frozen=True)
class Sublayers:
    """What a model's layers hold: the shape of each attention, and the modules that write to the stream, (L,) each.

    None stands for a layer that has no such sublayer, or none that could be dropped alone.
    """

    shapes: list[LayerShape | None]
    attention: list[nn.Module | None]
    mlps: list[nn.Module | None]

    def check(self, plan: DepthPlan) -> None:
        """Refuse a plan that these layers cannot follow."""
        if plan.layers != len(self.shapes):
            raise ValueError(f"the plan has {plan.layers} layers and the model {len(self.shapes)}")
        names = [f"layer {i} ({'no attention' if s is None else s.mask})" for i, s in enumerate(self.shapes)]
        for state in PASSED:
            for reader, source in enumerate(plan.sources(state)):
                if source is None or source == reader:
                    continue
                if isinstance(source, tuple):
                    raise ValueError(f"layer {reader} reads {state} of layers {source}, which a what-if cannot combine")
                if not may_share(self.shapes[reader], self.shapes[source]):
                    pair = f"{names[reader]} cannot read {state} of {names[source]}"
                    raise ValueError(f"{pair}: layers can share only if heads, sizes, masks and soft-caps agree")
        for layer, shape in enumerate(self.shapes):
            # a choice ranks all earlier tokens: a window hides some of them, and a sink takes a part of each row
            chooses = shape is not None and shape.mask == "causal" and not shape.sinks
            if plan.involves_choice(layer) and not chooses:
                raise ValueError(f"{names[layer]}: chosen tokens need full causal attention and no learned sinks")
        for name, vector, modules in (("attention", plan.keys, self.attention), ("MLP", plan.mlps, self.mlps)):
            lost = [i for i, source in enumerate(vector) if source is None and modules[i] is None]
            if lost:
                raise ValueError(f"layers {lost} have no separate {name} that could be dropped")


@torch.no_grad()
def find_sublayers(model: PreTrainedModel) -> Sublayers:
    """Find the layers' shapes and modules by a forward pass over two tokens."""
    calls: list[AttentionCall] = []
    seen: list[LayerStream] = []
    ids = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    with visited(model, calls.append), streams(model, seen.append):
        model.base_model(input_ids=ids, **no_cache(model))
    layers = len(layer_stack(model))
    by_layer: dict[int, Any] = {stream.layer: stream for stream in seen}
    return Sublayers(
        LayerShape.read(calls, model.config.get_text_config(), layers),
        [by_layer[i].attention for i in range(layers)],
        [by_layer[i].mlp for i in range(layers)],
    )


@contextmanager
def what_if(model: PreTrainedModel, plan: Wish) -> Iterator[None]:
    """Run `model` as if a plan, or methods, wired its layers; everything is restored on exit.

    Forward passes, cached or not, and `generate` then give the results of the retrofitted model before any training.

    Raises:
        ValueError: the model cannot be probed, or cannot follow the plan; the plan changes nothing; a method mixes
            states or streams; the model trains with activation checkpointing, which recomputes layers after their
            sources' states are freed.
    """
    model = unwrapped(model)
    if model.training and is_checkpointing(model):
        raise ValueError(CHECKPOINTED)
    present = plan_of(model.config)
    if present is not None and present != DepthPlan.identity(present.layers):
        raise ValueError("what-if needs a model without cross-layer methods; this model already has some")
    sublayers, methods = find_sublayers(model), []
    if not isinstance(plan, DepthPlan):
        methods = load_methods(plan)
        mixing = [method.name() for method in methods if mixes(method)]
        if mixing:
            raise ValueError(
                f"{', '.join(mixing)}: a what-if can share or remove states, but not mix states or streams with a "
                "method's own weights; convert the model with crosslayer.retrofit"
            )
        plan = merge_plans(methods, len(sublayers.shapes))
    if plan == DepthPlan.identity(plan.layers):
        raise ValueError(
            "the plan changes nothing: every layer reads only its own states; to mix states with a method's own "
            "weights, convert the model with crosslayer.retrofit"
        )
    sublayers.check(plan)
    choices = _Choices(model.config.get_text_config(), methods, plan)
    with ExitStack() as stack:
        loans = _Loans(plan)
        if loans.last:
            stack.enter_context(intercepted(model, loans))
        # behind the loans: a choice is made by the queries and keys that the layer attends with
        if choices.modules:
            stack.enter_context(intercepted(model, choices))
        for vector, modules in ((plan.keys, sublayers.attention), (plan.mlps, sublayers.mlps)):
            for source, module in zip(vector, modules, strict=True):
                if source is None and module is not None:
                    stack.callback(module.register_forward_hook(zero_output).remove)
        yield


class _Loans:
    """Puts lent states into the calls of their readers; a loan is kept until its last reader is past."""

    def __init__(self, plan: DepthPlan):
        self.plan = plan
        self.held: dict[tuple[str, int], Tensor] = {}
        self.last: dict[tuple[str, int], int] = {}  # of each loan the last reader
        for state in STATES:
            for reader in range(plan.layers):
                for source in plan.reads(state, reader):
                    if source != reader:
                        self.last[state, source] = reader

    def __call__(self, call: AttentionCall) -> AttentionCall:
        changed = {}
        for state, name in FIELDS.items():
            if not self.plan.reads(state, call.layer):
                continue
            (source,) = self.plan.reads(state, call.layer)  # several are refused before
            if source != call.layer:
                if (state, source) not in self.held:  # computed a second time, when the loan is gone
                    raise ValueError(CHECKPOINTED)
                changed[name] = self.held[state, source]
                # kept until the pass ends, states of all sources would take as much memory as the cache does
                if self.last[state, source] == call.layer:
                    del self.held[state, source]
            elif (state, source) in self.last:
                self.held[state, source] = getattr(call, name)
        return dataclasses.replace(call, **changed) if changed else call


class _Choices:
    """Masks all but the chosen tokens in the calls of layers that attend to these.

    `modules` are those with which layers choose tokens, or attend to chosen ones, by layer.
    """

    def __init__(self, config: Any, methods: Sequence[Method], plan: DepthPlan):
        self.plan = plan
        self.modules: dict[int, TokenChoice] = {}
        self.held: dict[int, Tensor | None] = {}  # by chooser
        layers = [layer for layer in range(plan.layers) if plan.involves_choice(layer)]
        if layers and not methods:
            raise ValueError("a plan does not have the options of methods that choose tokens; pass the method instead")
        for method in methods if layers else ():
            wiring = wire(methods, plan.layers)
            choices = {layer: method.choice(config, wiring, layer) for layer in layers}
            self.modules |= {layer: choice for layer, choice in choices.items() if choice is not None}

    def __call__(self, call: AttentionCall) -> AttentionCall:
        module, mask = self.modules.get(call.layer), call.mask
        if module is None:
            return call
        if call.position_bias is not None or not isinstance(mask, Tensor | None) or "flash" in call.implementation:
            raise ValueError(f"layer {call.layer}: chosen tokens need sdpa or eager attention without position biases")
        if call.layer in self.plan.choices:
            self.held[call.layer] = module.choose(call.query, call.key, mask, call.scaling, call.softcap)
        chooser = self.plan.choices[call.layer]
        choice = None if chooser is None else self.held[chooser]
        if choice is None:
            return call
        groups, total = call.query.shape[1] // call.key.shape[1], call.key.shape[2]
        return dataclasses.replace(call, mask=mask_of(module.of_reader(choice), total, groups, mask))


def zero_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Return zeros in place of a module's output, or of its first part; a forward hook."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)

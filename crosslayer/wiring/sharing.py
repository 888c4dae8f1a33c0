"""What a cross-layer method would make of a model's cache, without weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from crosslayer.core.decoder.families import model_types
from crosslayer.core.method import Method
from crosslayer.core.methods import load_method, method_class, to_entry
from crosslayer.wiring.result import ModelPlan, Sharing
from crosslayer.wiring.states import LayerStates


def share(plan: ModelPlan, entries: Sequence[Any]) -> tuple[Sharing, ...]:
    """Return the plan of a model with each method, by its name (a typical instance), as JSON or as a `Method`.

    Of several methods, one that is not possible for the model, or not in its engine, has the reason in place of a plan.

    Raises:
        ValueError: a method is unknown, or the only one is not possible.
    """
    shared = []
    for entry in entries:
        method = _method(entry, len(plan.layers))
        label = entry if isinstance(entry, str) else str(to_entry(method))
        try:
            shared.append(Sharing(label, _with(plan, method), _in_pretrained(method, plan)))
        except ValueError as error:
            if len(entries) == 1:
                raise
            shared.append(Sharing(label, None, f"not served by {plan.engine}: {error}"))
    return tuple(shared)


def _with(plan: ModelPlan, method: Method) -> ModelPlan:
    """Return the plan of a model with a method.

    Raises:
        ValueError: the method cannot be applied to the model; the message gives the reason.
    """
    for layer, states in enumerate(plan.layers):
        if not states.keys:
            raise ValueError(f"{method.name()}: layer {layer} ({states.mask}) has no keys and values to share")
    wiring = method.plan(len(plan.layers))
    merged = plan.plan.merge(wiring, (plan.model, method.name()))
    if not any(merged.attends(layer) for layer in range(merged.layers)):
        raise ValueError(f"{method.name()} leaves no layer with attention; at least one needs it")
    layers = list(plan.layers)
    for layer, window in enumerate(method.windows(len(layers)) or ()):
        mask = "full" if window is None else f"window {window}"
        layers[layer] = replace(layers[layer], window=window, mask=mask)
    for reader in range(len(layers)):
        for state in ("keys", "values"):
            for source in merged.reads(state, reader):
                if layers[reader] != layers[source]:
                    raise ValueError(
                        f"{method.name()}: layer {reader} ({layers[reader].mask}) would read {state} of layer {source} "
                        f"({layers[source].mask}); layers of different kinds cannot share"
                    )
        windowed = layers[reader].window is not None or layers[reader].every is not None
        if windowed and wiring.involves_choice(reader):
            raise ValueError(
                f"{method.name()}: layer {reader} ({layers[reader].mask}) cannot choose tokens or attend to chosen "
                "ones, only layers with full causal attention can"
            )
    reading = [layer for layer in range(len(layers)) if set(merged.reads("keys", layer)) - {layer}]
    if plan.engine == "llama.cpp" and reading:
        raise ValueError(f"llama.cpp cannot share across layers as {method.name()} does; use another `engine`")
    kept = (states if merged.attends(layer) else LayerStates("no attention") for layer, states in enumerate(layers))
    return replace(plan, plan=merged, layers=tuple(kept), methods=(*plan.methods, method.name()), shared=())


def _method(entry: Any, layers: int) -> Method:
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        try:
            entry = json.loads(entry)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"`method` must be a name or a JSON object, got {entry[:80]!r} ({error})") from None
    if isinstance(entry, str):
        return method_class(entry).example(layers)
    return load_method(dict(entry) if isinstance(entry, Mapping) else entry)


def _in_pretrained(method: Method, plan: ModelPlan) -> str:
    """Return whether a pretrained model of this type can be converted, in words."""
    if type(method).from_groups.__func__ is Method.from_groups.__func__:  # type: ignore[attr-defined]
        return "no, only trained from scratch"
    if plan.type not in model_types():
        return f"no model of type {plan.type} yet"
    return "yes, by retrofit"

"""The plan of a model from its config, and with a cross-layer method, without loading or downloading weights.

Nothing here imports modeling code at its top: reading a config takes little longer than importing its class.

Steps: config → what each layer caches, which layers share, the form of the residual → bytes.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from crosslayer.core.method import Method
from crosslayer.core.methods import load_method, method_class, to_entry
from crosslayer.core.transformers_versions import CACHE
from crosslayer.models.embedded import EMBEDDED
from crosslayer.models.errors import one_line_errors
from crosslayer.output.formatting import folder_name
from crosslayer.wiring.engines import item_sizes
from crosslayer.wiring.fields import as_in_transformers, read_wiring
from crosslayer.wiring.gguf import GgufConfig
from crosslayer.wiring.result import ModelPlan, Sharing
from crosslayer.wiring.source import Source
from crosslayer.wiring.states import LayerStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel as Model
else:
    Model = Any

# The whole model comes first: memory must also hold the parts that read images.
WHOLE = (auto.MODEL_FOR_MULTIMODAL_LM_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING)


def model_plan(
    model: Model | PreTrainedConfig | Source,
    length: int | Sequence[int] = 1,
    dtype: str | torch.dtype | None = None,
    *,
    kv_dtype: str | None = None,
    batch: int = 1,
    engine: str | None = None,
    memory: int | None = None,
) -> ModelPlan:
    """Return which layers of a model share states, what its cache holds, and the form of its residual: see `plan`."""
    lengths = (length,) if isinstance(length, int) else tuple(length)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"length must be at least 1 token, got {min(lengths, default='none')}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1 sequence, got {batch}")

    takes_cache = True
    source = model if isinstance(model, Source) else Source(model)
    if not isinstance(model, Source | PreTrainedConfig | GgufConfig):
        source, takes_cache = _loaded(model)
    config, weights_bytes, parameters, name = source
    # Only if memory is given: even an empty model imports its code, which takes longer than the rest of a plan.
    if memory is not None and weights_bytes is None:
        parameters = _count_parameters(config)
    try:
        wiring = read_wiring(config)
    # A field may have any value, and classes check few types: such an error is an error of the config.
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"the config of {config.model_type} has a value that cannot be used: {error}") from error

    dtype = str(dtype or wiring["dtype"]).removeprefix("torch.")
    engine = engine or ("llama.cpp" if isinstance(config, GgufConfig) and name not in EMBEDDED else "transformers")
    wiring |= {"dtype": dtype, "caches": wiring["caches"] and takes_cache}
    sizes = item_sizes(dtype, kv_dtype, engine)
    if engine == "transformers":
        wiring["layers"] = as_in_transformers(config, wiring["layers"])
    # llama.cpp loads a file as it is; other engines load its tensors in the dtype of the plan.
    if engine == "llama.cpp" and weights_bytes is not None:
        parameters = None
    return ModelPlan(
        **wiring,
        model=folder_name(name) or wiring["type"],
        kv_dtype=kv_dtype or dtype,
        engine=engine,
        sizes=sizes,
        lengths=lengths,
        batch=batch,
        weights_bytes=weights_bytes if parameters is None else round(parameters * sizes.model),
        parameters=parameters,
        memory=memory,
    )


def _loaded(model: Any) -> tuple[Source, bool]:
    """Return the config, weights and name of a loaded model, and whether its class takes a cache."""
    from transformers import PreTrainedModel

    from crosslayer.probe.model import unwrapped

    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"a model must be a name, a config or a PreTrainedModel, got {type(model).__name__}")
    weights_bytes = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    takes_cache = CACHE in inspect.signature(type(model).forward).parameters
    return Source(model.config, weights_bytes, None, model.name_or_path or ""), takes_cache


def _count_parameters(config: Any) -> int | None:
    """Return the parameters of the whole model of a config, None if transformers cannot build it by itself."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    if any("/" in str(getattr(part, "_attn_implementation", None)) for part in parts):
        return None  # attention code of the hub, which building the model would run
    try:
        with one_line_errors("config"), torch.device("meta"):
            model_class: Any = next(mapping[type(config)] for mapping in WHOLE if type(config) in mapping)
            return sum(weight.numel() for weight in model_class(config).parameters())
    except ValueError:
        return None


def share(plan: ModelPlan, entries: Sequence[Any]) -> tuple[Sharing, ...]:
    """Return the plan of a model with each method, by its name (a typical instance), as JSON or as a `Method`.

    Of several methods, one that is not possible for the model, or not in its engine, has the reason in place of a plan.

    Raises:
        ValueError: a method is unknown, or the only one is not possible.
    """
    from crosslayer.core.decoder.families import model_types

    layers = len(plan.layers)
    shared = []
    for entry in entries:
        values = entry
        if isinstance(entry, str) and entry.lstrip().startswith("{"):
            try:
                values = json.loads(entry)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"`method` must be a name or a JSON object, got {entry[:80]!r} ({error})") from None
        if isinstance(values, str):
            method = method_class(values).example(layers)
        else:
            method = load_method(dict(values) if isinstance(values, Mapping) else values)

        pretrained = "yes, by retrofit"
        if not method.takes_groups():
            pretrained = "no, only trained from scratch"
        elif plan.type not in model_types():
            pretrained = f"no model of type {plan.type} yet"

        label = entry if isinstance(entry, str) else str(to_entry(method))
        try:
            shared.append(Sharing(label, _with(plan, method), pretrained))
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
    # Layers are compared with the windows of the method, which may make them alike or unlike.
    for reader in range(len(layers)):
        where = f"{method.name()}: layer {reader} ({layers[reader].mask})"
        for state in ("keys", "values"):
            for source in merged.reads(state, reader):
                if layers[reader] != layers[source]:
                    pair = f"{where} would read {state} of layer {source} ({layers[source].mask})"
                    alike = [[low, low + 1] for low in range(len(layers) - 1) if layers[low] == layers[low + 1]]
                    form = json.dumps({"name": method.name(), "groups": alike[-1:]})
                    hint = f"; name groups of one kind: {form}" if alike and hasattr(method, "groups") else ""
                    raise ValueError(f"{pair}; layers of different kinds cannot share{hint}")
        windowed = layers[reader].window is not None or layers[reader].every is not None
        if windowed and wiring.involves_choice(reader):
            raise ValueError(f"{where}: chosen tokens need full causal attention")
    reading = [layer for layer in range(len(layers)) if set(merged.reads("keys", layer)) - {layer}]
    # llama.cpp shares only as Gemma does: the last layers read the last ones before them.
    if plan.engine == "llama.cpp" and reading:
        raise ValueError(f"llama.cpp cannot share across layers as {method.name()} does; use another `engine`")
    for layer in range(len(layers)):
        if not merged.attends(layer):
            layers[layer] = LayerStates("no attention")
    return replace(plan, plan=merged, layers=tuple(layers), methods=(*plan.methods, method.name()), shared=())

"""Convert a pretrained model by methods and fit its compensation.

Weights are kept, dropped, changed or new, and all are listed. Kept weights are the source model's own tensors,
which the caller copies if needed.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.family import rotary
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.decoder.weights import to_config
from crosslayer.core.method import Compensated, Compensation, Method, Mixing, Wiring
from crosslayer.core.methods import Entry, load_methods, merge_plans, mixes, to_entry
from crosslayer.core.options import check_choice
from crosslayer.core.plan import DepthPlan
from crosslayer.verbs.retrofit.calibrate import Text, calibrate, uncovered_layers, why_no_refit
from crosslayer.verbs.retrofit.moments import FITS, LAYER_ONLY, REFITS, Fit
from crosslayer.verbs.retrofit.result import Weights

WIRED = "nothing can be fitted or searched in a model that has methods already"


@dataclass(frozen=True)
class Converted:
    """A converted model, before it is evaluated.

    Attributes:
        model: the model.
        weights: what became of the source's weights, by name.
        fit: how W_c and W_o were fitted; None if neither was.
        fits: the error before and after the fit, by layer from the first.
        refitted: the original's tensor of every W_o that was refitted, by name.

    """

    model: PreTrainedModel
    weights: Weights
    fit: str | None = None
    fits: list[Fit] = field(default_factory=list)
    refitted: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def convert_weights(source: PreTrainedModel, methods: list[Method]) -> Converted:
    """Convert a model of a supported family (decoder/families); the source model is not changed.

    If whole layers are dropped and nothing else changes, the result is of the source's own class.
    """
    extremes = {name: weight.aminmax() for name, weight in source.named_parameters() if weight.numel()}
    broken = [name for name, ends in extremes.items() if not all(end.isfinite() for end in ends)]  # 10 times faster
    if broken:
        raise ValueError(f"weights must be finite; {len(broken)} hold NaN or infinity, the first is {broken[0]}")
    config = to_config(source.config, [to_entry(method) for method in methods])
    dropped = _dropped_layers(config.wiring)
    if dropped:
        return _drop_layers(source, dropped)
    weights = dict(source.state_dict())
    changed = [name for method in config.wiring.methods for name in method.inherit(weights, config, config.wiring)]
    model = _build(source, config, weights)
    names = set(model.state_dict())
    kept = [name for name in changed if name in names]
    removed, new = sorted(set(weights) - names), sorted(names - set(weights))
    return Converted(model, Weights(dropped=removed, changed=kept, new=new))


def plain_decoder(source: PreTrainedModel) -> CrossLayerForCausalLM:
    """Return a pretrained model as a crosslayer decoder without methods, sharing its tensors."""
    model = convert_weights(source, []).model
    assert isinstance(model, CrossLayerForCausalLM)
    return model


def _build(source: PreTrainedModel, config: CrossLayerConfig, weights: dict[str, Tensor]) -> CrossLayerForCausalLM:
    """Return a crosslayer model with these weights; modules of methods get their initial values."""
    config._experts_implementation = source.config._experts_implementation
    model: Any = _empty(CrossLayerForCausalLM, config, source)
    tables = rotary(config)  # not in any checkpoint
    model.model.rotary_emb = None if tables is None else tables.to(source.device)
    names = set(model.state_dict())
    model.load_state_dict({name: weights[name] for name in names if name in weights}, strict=False, assign=True)
    model.tie_weights()
    for module in _mixing_modules(model):
        inherited = {name: weight for name, weight in module.state_dict().items() if not weight.is_meta}
        module.to_empty(device=source.device).to(source.dtype)
        module.apply(model._init_weights)
        module.load_state_dict(inherited, strict=False, assign=True)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{type(source).__name__} has no weight {missing[0]}; unload adapters before a retrofit")
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def _empty(model_class: type[PreTrainedModel], config: Any, source: PreTrainedModel) -> PreTrainedModel:
    """Build a model on the meta device, without memory."""
    attention = source.config._attn_implementation
    with torch.device("meta"):
        return model_class._from_config(config, dtype=source.dtype, attn_implementation=attention)


def _mixing_modules(module: nn.Module) -> Iterator[Mixing]:
    """Yield the outermost modules that methods added."""
    for child in module.children():
        if isinstance(child, Mixing):
            yield child
        else:
            yield from _mixing_modules(child)


def _dropped_layers(wiring: Wiring) -> list[int]:
    """Return the layers without attention, MLP and W_c if nothing else changes; otherwise none."""
    plan = wiring.plan
    dropped = [
        layer
        for layer in range(plan.layers)
        if not plan.attends(layer) and plan.mlps[layer] is None and wiring.compensation[layer] is None
    ]
    sources = tuple(None if layer in dropped else layer for layer in range(plan.layers))
    nothing_else = plan == DepthPlan(sources, sources, sources, sources)
    return dropped if nothing_else and not any(mixes(method) for method in wiring.methods) else []


def _drop_layers(source: PreTrainedModel, layers: list[int]) -> Converted:
    """Return a model of the source's own class without some layers, sharing its tensors."""
    kept = [layer for layer in range(source.config.num_hidden_layers) if layer not in layers]
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = len(kept)
    if "layer_types" in config.to_dict() and config.layer_types is not None:
        config.layer_types = [config.layer_types[layer] for layer in kept]
    model: Any = _empty(type(source), config, source)
    if source.model.rotary_emb is not None:  # learned positions are weights
        model.model.rotary_emb = type(source.model.rotary_emb)(config=config).to(source.device)
    for name, table in source.model.embed_tokens.named_buffers():  # Gemma's scale, not in any checkpoint
        setattr(model.model.embed_tokens, name, table)
    index = {str(old): str(new) for new, old in enumerate(kept)}
    weights, dropped = {}, []
    for name, weight in source.state_dict().items():
        parts = name.split(".")  # model.layers.N.…
        if parts[:2] != ["model", "layers"]:
            weights[name] = weight
        elif parts[2] in index:
            weights[".".join([*parts[:2], index[parts[2]], *parts[3:]])] = weight
        else:
            dropped.append(name)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = copy.deepcopy(source.generation_config)
    return Converted(model.eval(), Weights(dropped=sorted(dropped), changed=[], new=[]))


@torch.no_grad()
def convert(
    model: PreTrainedModel,
    methods: Entry | Sequence[Entry],
    *,
    calibration: Text | None = None,
    fit: str | None = None,
    groups: int = 1,
    share_weights: bool = False,
) -> Converted:
    """Convert a pretrained model to share or leave out attention; the original is not changed.

    `crosslayer.retrofit` also chooses layers before the conversion and measures the result afterwards.

    Args:
        model: the pretrained model, of a supported family.
        methods: a method or a list: names, {"name": …, option: …}, `Method` objects or classes.
        calibration: token ids (N, T) without padding, to fit the linear compensation W_c of methods that have one; or
            such ids by domain, {"web": …, "code": …}: a fit on several domains generalizes better to other text.
        fit: "zero", "mean" (arXiv 2502.00439, Theorem 3.1), "lstsq", "lmmse", "ridge", "layerwise", "refit" or
            "refit-o" (see calibrate.py).
            Default: "refit" where layers attend to another layer's states, else "layerwise"; or "ridge" if there is a
            change that these do not correct (a dropped MLP).
        groups: v of Theorem 3.1: how many groups of sequences have a mean of their own, for fit "mean".
        share_weights: share kept tensors with `model`; training one then changes both.

    Raises:
        ValueError: the family, the methods or the options are not supported, or the calibration text is too short.

    """
    chosen, layers = load_methods(methods), model.config.num_hidden_layers
    check_choice("convert", "fit", fit, (*FITS, None))
    same = merge_plans(chosen, layers) == DepthPlan.identity(layers)
    if same and not any(mixes(method) for method in chosen):
        names = ", ".join(method.name() for method in chosen) or "no method"
        raise ValueError(f"{names} changes nothing with these options; give layers")
    wired = isinstance(model.config, CrossLayerConfig) and bool(model.config.methods)
    compensated = any(isinstance(method, Compensated) and method.compensation for method in chosen)
    if wired and (fit is not None or compensated):
        raise ValueError(f"{WIRED}; leave out fit and compensation")
    initial, fits = convert_weights(model, chosen), []
    converted = initial.model
    if wired or (fit not in REFITS and not any(isinstance(module, Compensation) for module in converted.modules())):
        fit = None
    elif fit != "zero":
        plain = plain_decoder(model)
        assert isinstance(converted, CrossLayerForCausalLM)
        fit = _fit(plain, converted, fit)
        if calibration is None:
            raise ValueError(f"fit {fit!r} needs calibration=… (token ids); use fit='zero' without text")
        fits = calibrate(plain, converted, calibration, fit, groups)
    if not share_weights:
        for parameter in converted.parameters():
            parameter.data = parameter.data.clone()
    originals = model.state_dict()
    changed = [fitted.layer for fitted in fits if fitted.output_penalty is not None]
    outputs = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in changed]  # W_o in all families
    refitted = {name: originals[name] for name in outputs}
    return Converted(converted, initial.weights.model_copy(update={"refitted": outputs}), fit, fits, refitted)


def _fit(plain: CrossLayerForCausalLM, model: CrossLayerForCausalLM, fit: str | None) -> str:
    """Return the fit of W_c; raise for a layerwise fit that would leave a change uncorrected."""
    if fit not in (*LAYER_ONLY, None):
        return fit
    uncovered = uncovered_layers(plain, model, fit or "layerwise")
    if fit is not None and uncovered:
        raise ValueError(f"fit {fit!r} cannot correct the change of layers {uncovered} (a dropped MLP); use ridge")
    if fit is None:
        fit = "ridge" if uncovered else "refit" if why_no_refit(model) is None else "layerwise"
    return fit

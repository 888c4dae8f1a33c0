"""Convert a pretrained model by methods, and make up for what it loses: the step inside a retrofit that changes it.

Weights are kept, dropped, merged or new, and each is listed. What stays is the very tensor of the source; a copy is the
caller's business.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.family import rotary
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.decoder.weights import to_config
from crosslayer.core.method import Compensation, Method, Mixing, Wiring, mixes
from crosslayer.core.methods import Entry, load_methods, merge_plans, to_entry
from crosslayer.core.options import check_choice
from crosslayer.core.plan import DepthPlan
from crosslayer.verbs.retrofit.calibrate import Text, calibrate, changed_alone, why_no_refit
from crosslayer.verbs.retrofit.moments import ALONE, FITS, REFITS, Fit
from crosslayer.verbs.retrofit.result import Weights


@dataclass(frozen=True)
class Converted:
    """A model with another wiring, before it is judged.

    Attributes:
        model: the model.
        weights: what became of the source's weights, by name.
        fit: how W_c and W_o were fitted; None where neither was.
        fits: what they do in each layer that was fitted, from below.
        refitted: the original's tensor of every W_o that was refitted, by name.

    """

    model: PreTrainedModel
    weights: Weights
    fit: str | None = None
    fits: list[Fit] = field(default_factory=list)
    refitted: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def convert_weights(source: PreTrainedModel, methods: list[Method], merge: str = "first") -> Converted:
    """Convert a model of a family that converts (decoder/families).

    Where whole layers go and nothing else changes, the model is of the source's own class.

    The source stays as it is. `merge` says what becomes of weights that a group shares, a rule of a method's `merges`.
    """
    extremes = {name: weight.aminmax() for name, weight in source.named_parameters() if weight.numel()}
    broken = [name for name, ends in extremes.items() if not all(end.isfinite() for end in ends)]
    if broken:  # extremes tell in a tenth of the time
        raise ValueError(f"{len(broken)} weights hold NaN or infinity, the first is {broken[0]}; they must be finite")
    config = to_config(source.config, [to_entry(method) for method in methods])
    gone = _layers_gone(config.wiring)
    if gone and merge == "first":
        return _without_layers(source, gone)
    weights = dict(source.state_dict())
    knowing = [method for method in config.wiring.methods if merge in method.merges]
    if merge != "first" and not knowing:
        rules = sorted({rule for method in config.wiring.methods for rule in method.merges})
        raise ValueError(f"merge {merge!r} is not known to these methods; use {' or '.join(rules) or 'first'}")
    merged = [name for method in knowing for name in method.inherit(weights, config, config.wiring, merge)]
    if merge != "first" and not merged:
        raise ValueError(f"merge {merge!r} merges what groups of layers share, and there are none; use first")
    model = _converted(source, config, weights)
    names = set(model.state_dict())
    kept = [name for name in merged if name in names]
    return Converted(
        model, Weights(dropped=sorted(set(weights) - names), merged=kept, new=sorted(names - set(weights)))
    )


def plain_decoder(source: PreTrainedModel) -> CrossLayerForCausalLM:
    """Return a pretrained model as a decoder of ours without methods, of the very same tensors."""
    model = convert_weights(source, []).model
    assert isinstance(model, CrossLayerForCausalLM)
    return model


def _converted(source: PreTrainedModel, config: CrossLayerConfig, weights: dict[str, Tensor]) -> CrossLayerForCausalLM:
    """Return our model with these weights; modules of methods begin with their first values."""
    config._experts_implementation = source.config._experts_implementation
    model: Any = _empty(CrossLayerForCausalLM, config, source)
    tables = rotary(config)  # which no checkpoint holds
    model.model.rotary_emb = None if tables is None else tables.to(source.device)
    names = set(model.state_dict())
    model.load_state_dict({name: weights[name] for name in names if name in weights}, strict=False, assign=True)
    model.tie_weights()
    for module in _of_methods(model):
        inherited = {name: weight for name, weight in module.state_dict().items() if not weight.is_meta}
        module.to_empty(device=source.device).to(source.dtype)
        module.apply(model._init_weights)
        module.load_state_dict(inherited, strict=False, assign=True)
    lost = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lost:
        raise ValueError(f"{type(source).__name__} has no weight {lost[0]}; unload adapters before a retrofit")
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def _empty(kind: type[PreTrainedModel], config: Any, source: PreTrainedModel) -> PreTrainedModel:
    """Build a model without memory."""
    attention = source.config._attn_implementation
    with torch.device("meta"):
        return kind._from_config(config, dtype=source.dtype, attn_implementation=attention)


def _of_methods(module: nn.Module) -> Iterator[Mixing]:
    """Yield the modules that methods brought along, without those inside of them."""
    for child in module.children():
        if isinstance(child, Mixing):
            yield child
        else:
            yield from _of_methods(child)


def _layers_gone(wiring: Wiring) -> list[int]:
    """Return the layers without attention, MLP and W_c, if that is all that a wiring changes; otherwise nothing."""
    plan = wiring.plan
    gone = [
        layer
        for layer in range(plan.layers)
        if not plan.attends(layer) and plan.mlps[layer] is None and wiring.compensation[layer] is None
    ]
    sources = tuple(None if layer in gone else layer for layer in range(plan.layers))
    nothing_else = plan == DepthPlan(sources, sources, sources, sources)
    return gone if nothing_else and not any(mixes(method) for method in wiring.methods) else []


def _without_layers(source: PreTrainedModel, gone: list[int]) -> Converted:
    """Return a model of the source's own class without some layers; what stays is the very tensor of the source."""
    kept = [layer for layer in range(source.config.num_hidden_layers) if layer not in gone]
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = len(kept)
    if "layer_types" in config.to_dict() and config.layer_types is not None:
        config.layer_types = [config.layer_types[layer] for layer in kept]
    model: Any = _empty(type(source), config, source)
    if source.model.rotary_emb is not None:  # positions that are learned are weights
        model.model.rotary_emb = type(source.model.rotary_emb)(config=config).to(source.device)
    for name, table in source.model.embed_tokens.named_buffers():  # Gemma's scale, which no checkpoint holds
        setattr(model.model.embed_tokens, name, table)
    place = {str(old): str(new) for new, old in enumerate(kept)}
    weights, dropped = {}, []
    for name, weight in source.state_dict().items():
        parts = name.split(".")  # of a layer: model.layers.N.…
        if parts[:2] != ["model", "layers"]:
            weights[name] = weight
        elif parts[2] in place:
            weights[".".join([*parts[:2], place[parts[2]], *parts[3:]])] = weight
        else:
            dropped.append(name)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = copy.deepcopy(source.generation_config)
    return Converted(model.eval(), Weights(dropped=sorted(dropped), merged=[], new=[]))


@torch.no_grad()
def convert(
    model: PreTrainedModel,
    methods: Entry | Sequence[Entry],
    *,
    calibration: Text | None = None,
    fit: str | None = None,
    groups: int = 1,
    merge: str = "first",
    progress: Callable[[int, int], None] | None = None,
    share_weights: bool = False,
) -> Converted:
    """Give a pretrained model of a family that converts another wiring; the original is left as it is.

    `crosslayer.retrofit` does this, chooses layers before and judges the result afterwards.

    Args:
        model: the pretrained model.
        methods: a method or a list: names, {"name": …, option: …}, `Method` objects or classes.
        calibration: token ids (N, T) without padding, to fit W_c where a method has a compensation; or such ids by
            domain, {"web": …, "code": …}: what is fitted to several carries over better to text of other kinds.
        fit: "zero", "mean" (arXiv 2502.00439, Theorem 3.1), "lstsq", "lmmse", "ridge", "layerwise", "refit" or
            "refit-o" (see calibrate.py).
            Default: "refit" where layers attend to borrowed states, else "layerwise"; or "ridge" where anything changes
            outside of what these stand for (a merge, an MLP that goes).
        groups: v of Theorem 3.1: how many groups of sequences have a mean of their own, for fit "mean".
        merge: what becomes of pretrained weights that a group shares, a rule of a method's `merges`.
        progress: called after each calibrated layer with (done, all).
        share_weights: leave what stays as the very tensors of `model`; training it then changes both.

    Raises:
        ValueError: the family, the wiring or the options are not possible, or the calibration text is too short.

    """
    chosen, layers = load_methods(methods), model.config.num_hidden_layers
    check_choice("convert", "fit", fit, (*FITS, None))
    same = merge_plans(chosen, layers) == DepthPlan.identity(layers)
    if same and not any(mixes(method) for method in chosen):
        names = ", ".join(method.name() for method in chosen) or "no method"
        raise ValueError(f"{names} as it stands changes nothing; name layers")
    made, fits = convert_weights(model, chosen, merge), []
    converted = made.model
    if fit not in REFITS and not any(isinstance(module, Compensation) for module in converted.modules()):
        fit = None
    elif fit != "zero":
        plain = plain_decoder(model)
        assert isinstance(converted, CrossLayerForCausalLM)
        fit = _fit(plain, converted, fit)
        if calibration is None:
            raise ValueError(f"fit {fit!r} needs calibration=… (token ids); without text use fit='zero'")
        fits = calibrate(plain, converted, calibration, fit, groups, progress)
    if not share_weights:
        for parameter in converted.parameters():
            parameter.data = parameter.data.clone()
    originals = model.state_dict()
    changed = [fitted.layer for fitted in fits if fitted.output_penalty is not None]
    outputs = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in changed]  # W_o, in all families
    refitted = {name: originals[name] for name in outputs}
    return Converted(converted, made.weights.model_copy(update={"refitted": outputs}), fit, fits, refitted)


def _fit(plain: CrossLayerForCausalLM, model: CrossLayerForCausalLM, fit: str | None) -> str:
    """Return how W_c is fitted; a fit of each layer alone is refused where it would leave a change out."""
    if fit not in (*ALONE, None):
        return fit
    alone = changed_alone(plain, model, fit or "layerwise")
    if fit is not None and alone:
        raise ValueError(
            f"fit {fit!r} makes up for nothing in layers {alone}, which change outside of what it stands for "
            "(a merged source, an MLP that goes); use ridge"
        )
    if fit is None:
        fit = "ridge" if alone else "refit" if why_no_refit(model) is None else "layerwise"
    return fit

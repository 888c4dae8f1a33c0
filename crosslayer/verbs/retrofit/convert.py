"""Convert a pretrained model by methods, and fit linear compensation (W_c) layer by layer, from the first.

    E = target − x'_converted  (residual streams after attention),  X = the normed input of the layer,  X W_c ≈ E

X is the output of W_v where W_c reads that.

"layerwise": the target is the original layer's output on the *converted* model's stream, so that W_c corrects the
change of this layer only. For all other fits the target is the original model's own stream, so that W_c also has to
correct the errors of the layers before it, which generalizes to similar text only.

"mean": W_c = pinv(X̄) Ē over position-wise means in v groups of sequences (arXiv 2502.00439, Theorem 3.1).
"lstsq": least squares over all tokens. "ridge" and "layerwise" have a penalty chosen by leave-one-domain-out.

"refit": as "layerwise", and in readers (layers that attend to another layer's states, for which their W_o was not
trained) W_o together with W_c: E is regressed on [concatenated heads ‖ X]; the two weights are the change of W_o, and
W_c. "refit-o": W_o alone, which adds no parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import convert_weights, plain_decoder
from crosslayer.core.decoder.layer import CrossLayerDecoderLayer
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import ON_HEADS, Compensated, Compensation, Method
from crosslayer.core.methods import Entry, load_methods, merge_plans, mixes
from crosslayer.core.options import check_choice
from crosslayer.core.plan import DepthPlan
from crosslayer.models.load import replaced
from crosslayer.output.progress import progress
from crosslayer.verbs.retrofit.moments import FITS, LAYER_ONLY, REFITS, Fit, Moments, check_enough
from crosslayer.verbs.retrofit.result import Weights
from crosslayer.verbs.retrofit.streams import Streams, computes_the_same, layers_of, same_weights

# The original's layers run one by one, without the states that layers of such a model read from others.
WIRED = "a model that already has methods cannot be fitted or searched"
POST_NORM_ERROR = (
    "this model normalizes attention's output before the residual, so W_o cannot be refitted; use layerwise"
)
Text = Tensor | Mapping[str, Tensor]  # ids (N, T), or those of each domain by name


@dataclass(frozen=True)
class Converted:
    """A converted model, before it is evaluated.

    Attributes:
        model: the model.
        plan: which layer each of the original's layers reads.
        weights: what became of the source's weights, by name.
        fit: how W_c and W_o were fitted; None if neither was.
        fits: the error before and after the fit, by layer from the first.
        refitted: the original's tensor of every W_o that was refitted, by name.
    """

    model: PreTrainedModel
    plan: DepthPlan
    weights: Weights
    fit: str | None = None
    fits: list[Fit] = field(default_factory=list)
    refitted: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def uncompensated(self, model: PreTrainedModel) -> Iterator[None]:
        """Run the model without what was fitted inside the block: W_c is zero, W_o the original's."""
        without: dict[nn.Parameter, Tensor] = {}
        for path, module in model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                plain = torch.zeros_like(weight) if isinstance(module, Compensation) else None
                plain = self.refitted.get(f"{path}.{name}", plain)
                if plain is not None:
                    without[weight] = plain
        with replaced(without):
            yield


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
    """Convert a pretrained model to share or remove attention; the original does not change.

    `crosslayer.retrofit` also chooses layers before the conversion and measures the result afterwards.

    Args:
        model: the pretrained model, of a supported family.
        methods: a method or a list: names, {"name": …, option: …}, `Method` objects or classes.
        calibration: token ids (N, T) without padding, to fit the linear compensation W_c of methods that have one; or
            such ids by domain, {"web": …, "code": …}: a fit on several domains generalizes better to other text.
        fit: "zero", "mean" (arXiv 2502.00439, Theorem 3.1), "lstsq", "ridge", "layerwise", "refit" or "refit-o"
            (see the top of this file).
            Default: "refit" if layers attend to another layer's states, else "layerwise"; or "ridge" if there is a
            change that these do not correct (a dropped MLP).
        groups: v of Theorem 3.1: the number of groups of sequences, each with its own mean, for fit "mean".
        share_weights: share kept tensors with `model`; training one then changes both.

    Raises:
        ValueError: the family, the methods or the options are not supported, or the calibration text is too short.
    """
    chosen = load_methods(methods)
    layers = model.config.num_hidden_layers
    check_choice("convert", "fit", fit, (*FITS, None))
    plan = merge_plans(chosen, layers)
    if plan == DepthPlan.identity(layers) and not any(mixes(method) for method in chosen):
        names = ", ".join(method.name() for method in chosen) or "no method"
        raise ValueError(f"{names} changes nothing with these options; give layers")
    wired = isinstance(model.config, CrossLayerConfig) and bool(model.config.methods)
    compensated = any(isinstance(method, Compensated) and method.compensation for method in chosen)
    if wired and (fit is not None or compensated):
        raise ValueError(f"{WIRED}; leave out fit and compensation")

    converted, weights = convert_weights(model, chosen)
    fits = []
    if wired or (fit not in REFITS and not any(isinstance(module, Compensation) for module in converted.modules())):
        fit = None
    elif fit != "zero":
        plain = plain_decoder(model)
        assert isinstance(converted, CrossLayerForCausalLM)
        fit = fit_for(plain, converted, fit)
        if calibration is None:
            raise ValueError(f"fit {fit!r} needs calibration=… (token ids); use fit='zero' without text")
        fits = calibrate(plain, converted, calibration, fit, groups)

    # only now: what a fit corrects is found by the tensors that both models share
    if not share_weights:
        for parameter in converted.parameters():
            parameter.data = parameter.data.clone()
    originals = model.state_dict()
    changed = [fitted.layer for fitted in fits if fitted.output_penalty is not None]
    outputs = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in changed]  # W_o in all families
    refitted = {name: originals[name] for name in outputs}
    plan = converted.config.plan if wired else plan
    return Converted(converted, plan, Weights(**weights._asdict(), refitted=outputs), fit, fits, refitted)


@torch.no_grad()
def calibrate(
    original: CrossLayerForCausalLM, model: CrossLayerForCausalLM, text: Text, fit: str = "layerwise", groups: int = 1
) -> list[Fit]:
    """Fit and set every W_c of `model`, converted from `original`; the refits also refit W_o of every reader.

    `text` is ids (N, T), or these by domain: each in turn is held out to choose a penalty. The fit "zero" sets W_c to
    zero and reports the error without compensation; `groups` is v, of "mean".
    """
    domains = [text] if isinstance(text, Tensor) else list(text.values())
    _check(model, domains, fit, groups)
    # To correct only a layer's own change carries over to other text: the KL on six unseen domains is 0.700, with the
    # original model's own stream as the target 0.795, without W_c 0.948.
    streams = Streams(original, model, torch.cat(domains), run_on="converted" if fit in LAYER_ONLY else "own")
    layers = fitted_layers(model, fit)
    fits = []
    highest = layers[-1]
    # from the first layer up: each is fitted on the stream of a model whose lower layers are fitted
    with progress("calibrating", highest + 1) as bar:
        for layer in range(highest + 1):
            if layer in layers:
                fits.append(fit_layer(streams, layer, fit, [len(ids) for ids in domains], groups))
            if layer < highest:
                streams.advance(layer)
            bar.step(layer + 1, highest + 1)
    return fits


def fit_for(original: CrossLayerForCausalLM, model: CrossLayerForCausalLM, fit: str | None) -> str:
    """Return the fit of W_c, the default one for None; raise for a layerwise fit that leaves a change uncorrected.

    The models share their weights' tensors. Of single layers "ridge" alone corrects what W_c does not replace, such as
    a dropped MLP.
    """
    if fit is not None and fit not in LAYER_ONLY:
        return fit
    layers = fitted_layers(model, fit or "layerwise")
    targets = model.config.wiring.compensation
    uncovered = []
    for layer, (before, after) in enumerate(zip(layers_of(original), layers_of(model), strict=True)):
        if layer not in layers:
            covered = computes_the_same(before, after)
        else:
            assert before.mlp is not None
            covered = targets[layer] == "mlp" or (after.mlp is not None and same_weights(before.mlp, after.mlp))
        if not covered:
            uncovered.append(layer)
    if fit is None:
        return "ridge" if uncovered else "refit" if why_no_refit(model) is None else "layerwise"
    if uncovered:
        raise ValueError(f"fit {fit!r} cannot correct the change of layers {uncovered} (a dropped MLP); use ridge")
    return fit


def fitted_layers(model: CrossLayerForCausalLM, fit: str) -> list[int]:
    """Return the layers in which W_c, or W_o of a reader, is fitted."""
    return [
        layer
        for layer, block in enumerate(layers_of(model))
        if block.compensation is not None or fit in REFITS and is_reader(block)
    ]


def why_no_refit(model: CrossLayerForCausalLM) -> str | None:
    """Return why W_o cannot be refitted in a model; None if it can."""
    if not any(is_reader(block) for block in layers_of(model)):
        return "no layer attends to another layer's states, so there is no W_o to refit; use layerwise"
    if model.config.components.post_norms:
        return POST_NORM_ERROR
    targets = sorted({target for target in model.config.wiring.compensation if target not in (None, "attention")})
    if targets:
        return f"refitting W_o needs target 'attention', got {targets[0]!r}"
    return None


def is_reader(block: CrossLayerDecoderLayer) -> bool:
    """Return whether a layer attends to another layer's states, or to chosen tokens alone."""
    attention = block.self_attn
    return attention is not None and (bool(attention.sources) or attention.attends_to_choice)


def fit_layer(streams: Streams, layer: int, fit: str, sizes: list[int], groups: int = 1, roughly: bool = False) -> Fit:
    """Fit W_c and W_o of a layer, where it has them and the fit covers them, to the layer's error.

    `roughly`: with the same penalty for both.
    """
    block = streams.layers_after[layer]
    compensation = block.compensation
    attention = block.self_attn if fit in REFITS and is_reader(block) else None
    assert compensation is None or isinstance(compensation, Compensation)
    if compensation is not None:
        compensation.reset()  # the error is that of the layer without it

    # what the fit reads, by name with its width: concatenated heads for W_o, and the input of W_c
    inputs = {} if attention is None else {"heads": attention.o_proj.in_features}
    heads = sum(inputs.values())
    read = "values" if compensation is not None and compensation.reads_values else "normed"
    inputs |= {read: compensation.in_features} if compensation is not None else {}
    target = "attention" if compensation is None else compensation.target
    moments = Moments(streams.after[0], sizes, groups, list(inputs.values()))
    for x, error in streams.errors(layer, target, list(inputs)):  # (B, T, I), (B, T, C)
        moments.add(x, error)
    weight, penalties, left_out = moments.solve(fit, roughly)  # (I, C)
    penalty_of = dict(zip(inputs, penalties, strict=False))  # fits without a choice have none

    if attention is not None:
        old = attention.o_proj.weight  # may share its tensor with the original model
        refitted = (old.double() + weight[:heads].T).to(old.dtype)
        attention.o_proj.weight = nn.Parameter(refitted, old.requires_grad)
    if compensation is not None:
        written = weight[heads:].T
        if compensation.target in ON_HEADS:
            assert block.self_attn is not None
            projection = block.self_attn.o_proj.weight.double()  # (C, H·D)
            written = torch.linalg.pinv(projection) @ written  # (H·D, inputs)
            weight = torch.cat([weight[:heads], (projection @ written).T])  # what passes through W_o
        compensation.weight.copy_(written)
    return moments.report(
        layer, weight, penalty=penalty_of.get(read), left_out=left_out, output_penalty=penalty_of.get("heads")
    )


def _check(model: CrossLayerForCausalLM, domains: list[Tensor], fit: str, groups: int) -> None:
    """Raise for what cannot be fitted."""
    check_choice("calibrate", "fit", fit, FITS)
    wiring = model.config.wiring
    if not fitted_layers(model, fit):
        raise ValueError("no layer has a W_c to fit; give the method compensation='attention'")
    if fit in REFITS and (reason := why_no_refit(model)) is not None:
        raise ValueError(reason)
    if model.config.components.post_norms and {*ON_HEADS} & {*wiring.compensation}:
        raise ValueError(
            "this model normalizes attention's output, so W_c cannot be added before W_o; use target 'attention'"
        )
    if any(type(method).residual is not Method.residual for method in wiring.methods):
        names = ", ".join(method.name() for method in wiring.methods)
        raise ValueError(
            f"{names}: W_c cannot be fitted where methods change the residual stream; train it instead (fit 'zero')"
        )
    lengths = {ids.shape[1] for ids in domains}
    if len(lengths) != 1:
        raise ValueError(f"calibration sequences must have equal length, got {sorted(lengths)}")
    sizes = [len(ids) for ids in domains]
    if not 1 <= groups <= sum(sizes):
        raise ValueError(f"groups must be between 1 and the {sum(sizes)} calibration sequences, got {groups}")
    width = input_width(model.config, fit)
    check_enough(width, sizes, lengths.pop(), fit)


def input_width(config: CrossLayerConfig, fit: str) -> int:
    """Return the largest number of inputs of a fit in any layer."""
    assert config.num_attention_heads is not None and config.head_dim is not None
    heads = config.num_attention_heads * config.head_dim
    return {"refit": heads + config.hidden_size, "refit-o": heads}.get(fit, config.hidden_size)

"""Convert a pretrained model by methods and fit its compensation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import convert_weights, plain_decoder
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Compensated, Compensation
from crosslayer.core.methods import Entry, load_methods, merge_plans, mixes
from crosslayer.core.options import check_choice
from crosslayer.core.plan import DepthPlan
from crosslayer.models.load import replaced
from crosslayer.verbs.retrofit.calibrate import Text, calibrate, fit_for
from crosslayer.verbs.retrofit.moments import FITS, REFITS, Fit
from crosslayer.verbs.retrofit.result import Weights

WIRED = "a model that already has methods cannot be fitted or searched"


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
        fit: "zero", "mean" (arXiv 2502.00439, Theorem 3.1), "lstsq", "lmmse", "ridge", "layerwise", "refit" or
            "refit-o" (see calibrate.py).
            Default: "refit" if layers attend to another layer's states, else "layerwise"; or "ridge" if there is a
            change that these do not correct (a dropped MLP).
        groups: v of Theorem 3.1: the number of groups of sequences, each with its own mean, for fit "mean".
        share_weights: share kept tensors with `model`; training one then changes both.

    Raises:
        ValueError: the family, the methods or the options are not supported, or the calibration text is too short.
    """
    chosen, layers = load_methods(methods), model.config.num_hidden_layers
    check_choice("convert", "fit", fit, (*FITS, None))
    plan = merge_plans(chosen, layers)
    if plan == DepthPlan.identity(layers) and not any(mixes(method) for method in chosen):
        names = ", ".join(method.name() for method in chosen) or "no method"
        raise ValueError(f"{names} changes nothing with these options; give layers")
    wired = isinstance(model.config, CrossLayerConfig) and bool(model.config.methods)
    compensated = any(isinstance(method, Compensated) and method.compensation for method in chosen)
    if wired and (fit is not None or compensated):
        raise ValueError(f"{WIRED}; leave out fit and compensation")
    (converted, weights), fits = convert_weights(model, chosen), []
    if wired or (fit not in REFITS and not any(isinstance(module, Compensation) for module in converted.modules())):
        fit = None
    elif fit != "zero":
        plain = plain_decoder(model)
        assert isinstance(converted, CrossLayerForCausalLM)
        fit = fit_for(plain, converted, fit)
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
    plan = converted.config.plan if wired else plan
    return Converted(converted, plan, Weights(**weights._asdict(), refitted=outputs), fit, fits, refitted)

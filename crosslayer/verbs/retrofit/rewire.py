"""Rewire a pretrained model by methods and make up for what it loses: the step inside a retrofit that changes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Compensation, Method, mixes
from crosslayer.core.methods import Entry, load_methods, merge_plans
from crosslayer.core.options import check_choice
from crosslayer.core.plan import DepthPlan
from crosslayer.verbs.retrofit.calibrate import Text, calibrate, changed_alone, why_no_refit
from crosslayer.verbs.retrofit.convert import Conversion, convert, plain_decoder
from crosslayer.verbs.retrofit.moments import ALONE, FITS, REFITS, Fit

OUTPUT = "model.layers.{}.self_attn.o_proj.weight"  # W_o of a layer, in all families that convert


@dataclass(frozen=True)
class Rewired(Conversion):
    """A model with another wiring, before it is judged.

    Attributes:
        methods: what it is wired by.
        fit: how W_c and W_o were fitted; None where neither was.
        fits: what they do in each layer that was fitted, from below.
        refitted: the original's tensor of every W_o that was refitted, by name.

    """

    methods: list[Method]
    fit: str | None
    fits: list[Fit]
    refitted: dict[str, Tensor]


@torch.no_grad()
def rewire(
    model: PreTrainedModel,
    methods: Entry | Sequence[Entry],
    *,
    calibration: Text | None = None,
    fit: str | None = None,
    groups: int = 1,
    merge: str = "first",
    progress: Callable[[int, int], None] | None = None,
    share_weights: bool = False,
) -> Rewired:
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
    check_choice("rewire", "fit", fit, (*FITS, None))
    same = merge_plans(chosen, layers) == DepthPlan.identity(layers)
    if same and not any(mixes(method) for method in chosen):
        names = ", ".join(method.name() for method in chosen) or "no method"
        raise ValueError(f"{names} as it stands changes nothing; name layers")
    conversion, fits = convert(model, chosen, merge), []
    rewired = conversion.model
    if fit not in REFITS and not any(isinstance(module, Compensation) for module in rewired.modules()):
        fit = None
    elif fit != "zero":
        plain = plain_decoder(model)
        assert isinstance(rewired, CrossLayerForCausalLM)
        fit = _fit(plain, rewired, fit)
        if calibration is None:
            raise ValueError(f"fit {fit!r} needs calibration=… (token ids); without text use fit='zero'")
        fits = calibrate(plain, rewired, calibration, fit, groups, progress)
    if not share_weights:
        for parameter in rewired.parameters():
            parameter.data = parameter.data.clone()
    originals = model.state_dict()
    outputs = [OUTPUT.format(fitted.layer) for fitted in fits if fitted.output_penalty is not None]
    refitted = {name: originals[name] for name in outputs}
    return Rewired(**vars(conversion), methods=chosen, fit=fit, fits=fits, refitted=refitted)


def _fit(plain: CrossLayerForCausalLM, model: CrossLayerForCausalLM, fit: str | None) -> str:
    """Return how W_c is fitted; a fit of each layer alone is refused where it would leave a change out."""
    if fit not in (*ALONE, None):
        return fit
    alone = changed_alone(plain, model, fit or "layerwise")
    if fit is not None and alone:
        raise ValueError(
            f"fit {fit!r} makes up for nothing in layers {alone}, which change outside of what it stands for "
            "(a merged leader, an MLP that goes); use ridge"
        )
    if fit is None:
        fit = "ridge" if alone else "refit" if why_no_refit(model) is None else "layerwise"
    return fit

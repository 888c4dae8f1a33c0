"""Rewire a pretrained model and make up for what it loses: the Python call behind `crosslayer retrofit`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from crosslayer.conversion.calibrate import Text, calibrate, changed_alone
from crosslayer.conversion.convert import convert
from crosslayer.conversion.moments import FITS, Fit
from crosslayer.decoder.modeling import CrossLayerForCausalLM
from crosslayer.method import Compensation, Method, check_choice
from crosslayer.methods import load_method, merge_plans
from crosslayer.plan import DepthPlan


@dataclass(frozen=True)
class Retrofit:
    """The rewired model, its methods, what became of the weights (names), how W_c was fitted and what it does.

    `fit` is None where there is no W_c; `fits` has an entry for each layer.
    """

    model: PreTrainedModel
    methods: list[Method]
    dropped: list[str]
    merged: list[str]
    new: list[str]
    fit: str | None
    fits: list[Fit]


@torch.no_grad()
def retrofit(
    model: PreTrainedModel,
    methods: str | Mapping[str, Any] | Method | Sequence[str | Mapping[str, Any] | Method],
    *,
    calibration: Text | None = None,
    fit: str | None = None,
    groups: int = 1,
    merge: str = "first",
    progress: Callable[[int, int], None] | None = None,
    share_weights: bool = False,
) -> Retrofit:
    """Give a pretrained Llama, Mistral, Qwen2 or Qwen3 model another wiring; the original is left as it is.

    Args:
        model: the pretrained model.
        methods: one method or a list: names, {"name": …, option: …}, or `Method` objects.
        calibration: token ids (N, T) without padding, to fit W_c where a method has a compensation; or such ids by
            domain, {"web": …, "code": …}: what is fitted to several carries over better to text of other kinds.
        fit: "zero", "mean" (Theorem 3.1 of UniAttn), "lstsq", "ridge" or "layerwise" (see calibrate.py). Default:
            "layerwise", or "ridge" where anything changes outside of what W_c stands for (a merge, a dropped MLP).
        groups: v of Theorem 3.1: how many groups of sequences have a mean of their own, for fit "mean".
        merge: keys and values of a CLA group: "first", "mean" or "svd".
        progress: called after each calibrated layer with (done, all).
        share_weights: leave what stays as the very tensors of `model`; training one then changes both.

    Raises:
        ValueError: the family, the wiring or the options are not possible, or the calibration text is too short.

    """
    given = [methods] if isinstance(methods, str | Mapping | Method) else list(methods)
    chosen = [load_method(entry) for entry in given]
    check_choice("retrofit", "fit", fit, (*FITS, None))
    layers = model.config.num_hidden_layers
    if merge_plans(chosen, layers) == DepthPlan.identity(layers) and all(_only_plans(method) for method in chosen):
        raise ValueError(f"{', '.join(m.name() for m in chosen) or 'no method'} as given changes nothing; name layers")
    made, fits = convert(model, chosen, merge), []
    if not any(isinstance(module, Compensation) for module in made.model.modules()):
        fit = None
    elif fit != "zero":
        plain = convert(model, []).model
        assert isinstance(plain, CrossLayerForCausalLM) and isinstance(made.model, CrossLayerForCausalLM)
        fit = _fit(plain, made.model, fit)
        if calibration is None:
            raise ValueError(f"fit {fit!r} needs calibration=… (token ids); without text use fit='zero'")
        fits = calibrate(plain, made.model, calibration, fit, groups, progress)
    if not share_weights:
        for parameter in made.model.parameters():
            parameter.data = parameter.data.clone()
    return Retrofit(made.model, chosen, made.dropped, made.merged, made.new, fit, fits)


def _fit(plain: CrossLayerForCausalLM, model: CrossLayerForCausalLM, fit: str | None) -> str:
    """Return how W_c is fitted; "layerwise" is refused where it would leave a change out."""
    if fit not in ("layerwise", None):
        return fit
    alone = changed_alone(plain, model)
    if fit is not None and alone:
        raise ValueError(
            f"fit 'layerwise' makes up for nothing in layers {alone}, which change outside of what W_c stands for "
            "(a merged leader, a dropped MLP); use ridge"
        )
    return "ridge" if alone else "layerwise"


def _only_plans(method: Method) -> bool:
    """Return whether a method has no modules of its own that mix."""
    kind = type(method)
    return all(getattr(kind, name) is getattr(Method, name) for name in ("heads", "residual", "final"))

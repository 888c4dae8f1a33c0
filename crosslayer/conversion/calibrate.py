"""Fit W_c, layer by layer from below, so that a rewired model follows the original on calibration text.

    E = wanted − x'_rewired  (streams after attention),  X = the normed input of the rewired layer,  X W_c ≈ E

"layerwise": wanted is what the original layer makes of the *rewired* model's stream, so that W_c stands for what was
taken from this layer and for nothing else. All others want the original model's own stream, so that W_c also has to
undo what went wrong below: it can do that on text of the same kind only.

"mean": W_c = pinv(X̄) Ē over position-wise means in v groups of sequences (arXiv 2502.00439, Theorem 3.1).
"lstsq": least squares over all tokens. "lmmse": the same on the original's own streams, each layer by itself, so that
with a bias W_c is the linear map with the least mean square error of what was taken (arXiv 2505.21077). "ridge",
"layerwise": with a penalty chosen by leaving a domain out. A bias of W_c is fitted along with it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from crosslayer.conversion.moments import FITS, Fit, Moments, check_enough
from crosslayer.conversion.streams import Streams, computes_the_same, layers_of, same_weights
from crosslayer.decoder.layer import CrossLayerDecoderLayer
from crosslayer.decoder.modeling import CrossLayerForCausalLM
from crosslayer.method import Compensation, Method
from crosslayer.options import check_choice

FOLLOWED = {"layerwise": "rewired", "lmmse": "original"}  # whose streams are fitted to; both models' by default
Text = Tensor | Mapping[str, Tensor]  # ids (N, T), or those of each domain by name


@torch.no_grad()
def calibrate(
    original: CrossLayerForCausalLM,
    model: CrossLayerForCausalLM,
    text: Text,
    fit: str = "layerwise",
    groups: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Fit]:
    """Fit and set every W_c of `model`.

    Args:
        original: the plain model with the same weights.
        model: the rewired model.
        text: ids (N, T), or those of several domains by name, of which each in turn is left out to choose a penalty.
        fit: how, as above; "zero" sets W_c to zero and reports what it would have to make up for.
        groups: v, the groups of sequences that have a mean of their own, for "mean".
        progress: called after each layer with (done, all).

    Raises:
        ValueError: there is no W_c, or too little text; the message says how many tokens are needed.

    """
    domains = [text] if isinstance(text, Tensor) else list(text.values())
    sizes = [len(ids) for ids in domains]
    _check(model, domains, fit, groups)
    streams = Streams(original, model, torch.cat(domains), follow=FOLLOWED.get(fit, "both"))
    targets = model.config.wiring.compensation
    compensated = [layer for layer, target in enumerate(targets) if target is not None]
    highest = compensated[-1]
    fits = []
    for layer in range(highest + 1):
        if layer in compensated:
            biased = model.config.wiring.compensation_bias[layer]
            fits.append(_fit(streams, layer, fit, Moments(streams.after[0], sizes, groups, biased)))
        if layer < highest:
            streams.advance(layer)
        if progress is not None:
            progress(layer + 1, highest + 1)
    return fits


def _fit(streams: Streams, layer: int, fit: str, moments: Moments) -> Fit:
    """Fit W_c of a layer to what the layer lacks without it."""
    rewired = streams.layers_after[layer]
    compensation = rewired.compensation
    assert isinstance(compensation, Compensation)
    compensation.reset()
    first = 0  # sequence of the batch
    for normed, lack in streams.gaps(layer, compensation.target):  # (B, T, C) each
        moments.add(normed, lack, first)
        first += len(normed)
    weight, penalty, left_out = moments.solve(fit)  # (C [+ 1, the bias], C)
    written = weight.T
    if compensation.target == "heads":
        assert rewired.self_attn is not None
        projection = rewired.self_attn.o_proj.weight.double()  # (C, H·D)
        written = torch.linalg.pinv(projection) @ written  # (H·D, C [+ 1])
        weight = (projection @ written).T  # what W_o lets through, (C [+ 1], C)
    compensation.weight.copy_(written[:, : compensation.in_features])
    if compensation.bias is not None:
        compensation.bias.copy_(written[:, -1])
    return moments.report(layer, weight, penalty, left_out)


def _check(model: CrossLayerForCausalLM, domains: list[Tensor], fit: str, groups: int) -> None:
    """Refuse what cannot be fitted."""
    check_choice("calibrate", "fit", fit, FITS)
    wiring = model.config.wiring
    if not any(wiring.compensation):
        raise ValueError("no layer has a W_c to fit; give the method compensation='attention'")
    if model.config.has_post_norms and "heads" in wiring.compensation:
        raise ValueError(
            "W_c before W_o is not fitted through the norm on attention's update that this model has; use target "
            "'attention'"
        )
    if any(type(method).residual is not Method.residual for method in wiring.methods):
        names = ", ".join(method.name() for method in wiring.methods)
        raise ValueError(f"{names}: W_c is fitted between plain residual streams; train it instead (fit 'zero')")
    lengths = {ids.shape[1] for ids in domains}
    if len(lengths) != 1:
        raise ValueError(f"calibration text needs sequences of equal length; its domains have {sorted(lengths)}")
    sizes = [len(ids) for ids in domains]
    if not 1 <= groups <= sum(sizes):
        raise ValueError(f"groups is {groups}; it must be between 1 and the {sum(sizes)} calibration sequences")
    check_enough(model.config.hidden_size, sizes, lengths.pop(), fit)


def changed_alone(original: CrossLayerForCausalLM, model: CrossLayerForCausalLM) -> list[int]:
    """Return the layers in which something changes that is in no layerwise target, and that only "ridge" sees.

    That is a layer without W_c, such as a leader whose keys and values were merged, or an MLP that is gone and that W_c
    does not write to. The models share their weights' tensors.
    """
    alone = []
    for layer, (before, after) in enumerate(zip(layers_of(original), layers_of(model), strict=True)):
        if not _is_covered(before, after, model.config.wiring.compensation[layer]):
            alone.append(layer)
    return alone


def _is_covered(before: CrossLayerDecoderLayer, after: CrossLayerDecoderLayer, target: str | None) -> bool:
    """Return whether all that changes in a layer is in the target of its W_c."""
    if target is None:
        return computes_the_same(before, after)
    assert before.mlp is not None
    return target == "mlp" or (after.mlp is not None and same_weights(before.mlp, after.mlp))

"""Fit W_c, layer by layer from below, so that a converted model follows the original on calibration text.

    E = wanted − x'_converted  (streams after attention),  X = the normed input of the converted layer,  X W_c ≈ E

"layerwise": wanted is what the original layer makes of the *converted* model's stream, so that W_c stands for what was
taken from this layer and for nothing else. All others want the original model's own stream, so that W_c also has to
undo what went wrong below: it can do that on text of the same kind only.

"mean": W_c = pinv(X̄) Ē over position-wise means in v groups of sequences (arXiv 2502.00439, Theorem 3.1).
"lstsq": least squares over all tokens. "lmmse": the same on the original's own streams, each layer by itself, so that
with a bias W_c is the linear map with the least mean square error of what was taken (arXiv 2505.21077). "ridge",
"layerwise": with a penalty chosen by leaving a domain out. A bias of W_c is fitted along with it.

"refit": as "layerwise", and in layers that attend to borrowed states, for which W_o was not made, W_o together with
W_c: E is regressed on [concatenated heads ‖ X], whose two weights are what is added to W_o, and W_c. "refit-o": W_o
alone, so that nothing is added to the model.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.layer import CrossLayerDecoderLayer
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Compensation, Method
from crosslayer.core.options import check_choice
from crosslayer.verbs.retrofit.moments import FITS, REFITS, Fit, Moments, check_enough
from crosslayer.verbs.retrofit.streams import Streams, computes_the_same, layers_of, same_weights

# whose streams are fitted to; both models' by default
FOLLOWED = {"layerwise": "converted", "refit": "converted", "refit-o": "converted", "lmmse": "original"}
NORMED = "W_o is not refitted through the norm on attention's update that this model has; use layerwise"
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
    """Fit and set every W_c of `model`, and by the refits W_o of every layer that attends to borrowed states.

    Args:
        original: the plain model with the same weights.
        model: the converted model.
        text: ids (N, T), or those of several domains by name, of which each in turn is left out to choose a penalty.
        fit: how, as above; "zero" sets W_c to zero and reports what it would have to make up for.
        groups: v, the groups of sequences that have a mean of their own, for "mean".
        progress: called after each layer with (done, all).

    """
    domains = [text] if isinstance(text, Tensor) else list(text.values())
    _check(model, domains, fit, groups)
    streams = Streams(original, model, torch.cat(domains), follow=FOLLOWED.get(fit, "both"))
    fitted, fits = fitted_layers(model, fit), []
    highest = fitted[-1]
    for layer in range(highest + 1):
        if layer in fitted:
            fits.append(fit_layer(streams, layer, fit, [len(ids) for ids in domains], groups))
        if layer < highest:
            streams.advance(layer)
        if progress is not None:
            progress(layer + 1, highest + 1)
    return fits


def fitted_layers(model: CrossLayerForCausalLM, fit: str) -> list[int]:
    """Return the layers in which something is fitted: W_c, or W_o of a layer that attends to borrowed states."""
    return [
        layer
        for layer, block in enumerate(layers_of(model))
        if block.compensation is not None or fit in REFITS and is_reader(block)
    ]


def why_no_refit(model: CrossLayerForCausalLM) -> str | None:
    """Return why W_o is not refitted beside every W_c of a model; None where it can be."""
    if not any(is_reader(block) for block in layers_of(model)):
        return "no layer attends to borrowed states, so there is no W_o to refit; use layerwise"
    if model.config.has_post_norms:
        return NORMED
    others = sorted(set(model.config.wiring.compensation) - {None, "attention"})  # pyright: ignore[reportArgumentType]
    if others:
        return f"W_o is refitted beside a W_c that writes to the stream; use target 'attention', not {others[0]!r}"
    return None


def is_reader(block: CrossLayerDecoderLayer) -> bool:
    """Return whether a layer attends to states that it borrows."""
    return block.self_attn is not None and bool(block.self_attn.sources)


def fit_layer(streams: Streams, layer: int, fit: str, sizes: list[int], groups: int = 1) -> Fit:
    """Fit W_c and W_o of a layer, as far as it has them and the fit asks for them, to what the layer lacks."""
    block = streams.layers_after[layer]
    compensation, attention = block.compensation, block.self_attn if fit in REFITS and is_reader(block) else None
    assert compensation is None or isinstance(compensation, Compensation)
    if compensation is not None:
        compensation.reset()
    inputs = {} if attention is None else {"heads": attention.o_proj.in_features}
    heads = sum(inputs.values())
    inputs |= {"normed": streams.after[0].shape[-1]} if compensation is not None else {}
    biased = compensation is not None and compensation.bias is not None
    moments = Moments(streams.after[0], sizes, groups, biased, list(inputs.values()))
    target = "attention" if compensation is None else compensation.target
    for x, lack in streams.gaps(layer, target, list(inputs)):  # (B, T, I), (B, T, C)
        moments.add(x, lack)
    weight, penalties, left_out = moments.solve(fit)  # (I [+ 1, the bias], C)
    penalty_of = dict(zip(inputs, penalties, strict=False))
    if attention is not None:
        old = attention.o_proj.weight  # whose tensor may be the original model's, too
        refitted = (old.double() + weight[:heads].T).to(old.dtype)
        attention.o_proj.weight = nn.Parameter(refitted, old.requires_grad)
    if compensation is not None:
        weight = torch.cat([weight[:heads], _write(block, compensation, weight[heads:])])
    return moments.report(
        layer, weight, penalty=penalty_of.get("normed"), left_out=left_out, output_penalty=penalty_of.get("heads")
    )


def _write(block: CrossLayerDecoderLayer, compensation: Compensation, weight: Tensor) -> Tensor:
    """Set W_c to a solution (C [+ 1, the bias], C), and return as much of that as reaches the stream."""
    written = weight.T
    if compensation.target == "heads":
        assert block.self_attn is not None
        projection = block.self_attn.o_proj.weight.double()  # (C, H·D)
        written = torch.linalg.pinv(projection) @ written  # (H·D, C [+ 1])
        weight = (projection @ written).T  # what W_o lets through, (C [+ 1], C)
    compensation.weight.copy_(written[:, : compensation.in_features])
    if compensation.bias is not None:
        compensation.bias.copy_(written[:, -1])
    return weight


def _check(model: CrossLayerForCausalLM, domains: list[Tensor], fit: str, groups: int) -> None:
    """Refuse what cannot be fitted."""
    check_choice("calibrate", "fit", fit, FITS)
    wiring = model.config.wiring
    if not fitted_layers(model, fit):
        raise ValueError("no layer has a W_c to fit; give the method compensation='attention'")
    if fit in REFITS and (reason := why_no_refit(model)) is not None:
        raise ValueError(reason)
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
    check_enough(inputs(model.config, fit), sizes, lengths.pop(), fit)


def inputs(config: CrossLayerConfig, fit: str) -> int:
    """Return how many inputs what is fitted has at the most, in layers of a model's width."""
    assert config.num_attention_heads is not None and config.head_dim is not None
    heads = config.num_attention_heads * config.head_dim
    return {"refit": heads + config.hidden_size, "refit-o": heads}.get(fit, config.hidden_size)


def changed_alone(original: CrossLayerForCausalLM, model: CrossLayerForCausalLM, fit: str) -> list[int]:
    """Return the layers in which something changes that is in no layerwise target, and that only "ridge" sees.

    That is a layer without W_c, such as a source whose keys and values were merged, or an MLP that is gone and that W_c
    does not write to. The models share their weights' tensors.
    """
    fitted, targets, alone = fitted_layers(model, fit), model.config.wiring.compensation, []
    for layer, (before, after) in enumerate(zip(layers_of(original), layers_of(model), strict=True)):
        if layer not in fitted:
            covered = computes_the_same(before, after)
        else:
            assert before.mlp is not None
            covered = targets[layer] == "mlp" or (after.mlp is not None and same_weights(before.mlp, after.mlp))
        if not covered:
            alone.append(layer)
    return alone

"""Which layers a method acts on: as named, the top half, or by what the model does on text."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans
from crosslayer.core.plan import DepthPlan, parse_layers
from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import Meter
from crosslayer.probe.intercept import no_cache
from crosslayer.probe.measures import mean_cosine
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.probe.what_if import look, what_if
from crosslayer.verbs.diagnose.groups import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.verbs.diagnose.run import diagnose
from crosslayer.verbs.retrofit.correlation import error_bounds
from crosslayer.verbs.retrofit.dissimilar import dissimilar_groups
from crosslayer.verbs.retrofit.record import Choice
from crosslayer.verbs.retrofit.request import Request
from crosslayer.verbs.retrofit.trade_off import methods_by_damage
from crosslayer.verbs.retrofit.wires import Kind


def choose(
    model: PreTrainedModel, request: Request, windows: dict[str, Windows], progress: Meter
) -> tuple[list[Method], Choice]:
    """Return the methods with their layers, and what the record says of the choice.

    `windows` is text by purpose, as `Texts.parts` names them.

    Raises:
        ValueError: the layers may not share, or a budget cannot be met; the message says why.

    """
    layers, kind, named = model.config.num_hidden_layers, request.kind, request.options.layers
    if request.whole is not None:
        look(model).check(request.whole.plan(layers))
        return [request.whole], Choice(how="as options")
    if kind is None:
        return methods_by_damage(model, windows, request, progress)
    if named == "auto":
        groups = _automatic(model, request, kind, windows["calibration" if request.many_tokens else "choice"], progress)
    elif named == "top-half":
        groups = _top_half(model, kind, request.options.size)
    else:
        groups = parse_layers(named, layers)
    method = request.compensated(request.from_groups(groups, layers))
    look(model).check(method.plan(layers))  # says which layers may not share, and why
    return [method], Choice(how=named, groups=groups)


def _top_half(model: PreTrainedModel, kind: Kind, size: int) -> Groups:
    """Return blocks from the last layer down within the top half; for a method on single layers, their followers."""
    blocks = paper_groups(look(model).shapes, size)
    if not blocks:
        raise ValueError(
            f"the top half has no {size} neighbouring layers of the same mask; name the layers (18+20,19+21 are groups "
            "that leave layers out)"
        )
    return blocks if kind.grouped else [[layer] for block in blocks for layer in block[1:]]


def _automatic(model: PreTrainedModel, request: Request, kind: Kind, windows: Windows, progress: Meter) -> Groups:
    """Return layers by what the model does on text, in the way that the request selects."""
    ids, layers, options = windows.ids, model.config.num_hidden_layers, request.options
    count = options.count or max(1, layers // 2 // PAPER_SIZE * (PAPER_SIZE - 1))
    if count >= layers:
        raise ValueError(f"`count` {count}: the model has {layers} layers, and at least 1 must stay")

    def plan_of(groups: Groups) -> DepthPlan:
        if not groups:
            return DepthPlan.identity(layers)
        return merge_plans([request.from_groups(groups, layers)], layers)

    if request.select == "distance":
        with progress("choosing layers", count) as bar:
            return dissimilar_groups(model, ids, plan_of, count, options.threshold, bar.step)
    if kind.grouped:
        return _similar_maps(model, ids, count, progress)
    first = plan_of([[0]])
    if first.attends(0):
        raise ValueError("`layers` auto ranks attention and whole layers; name the layers whose MLP goes")
    taken = "attention" if first.mlps[0] is not None else "layer"
    if request.select == "greedy":
        chosen = _greedy(model, ids, taken, count, plan_of)
    elif request.select == "similarity":
        diagnosis = diagnose(model, ids, progress=progress)
        similarity = diagnosis.attention_io_similarity if taken == "attention" else diagnosis.layer_io_similarity
        chosen = np.argsort(-similarity, kind="stable")[:count]  # of (L,)
    elif taken != "attention":
        raise ValueError("`select` correlation ranks attention; use similarity or greedy for whole layers")
    else:
        with progress("choosing layers", layers) as bar:
            chosen = np.argsort(error_bounds(model, ids, bar.step), kind="stable")[:count]
    return [[int(layer)] for layer in sorted(chosen)]


def _similar_maps(model: PreTrainedModel, ids: Tensor, count: int, progress: Meter) -> Groups:
    """Return neighbours with the most similar maps, `count` followers in all."""
    similarity = diagnose(model, ids, progress=progress).map_similarity_without_first  # (L, L)
    groups = similar_groups(similarity, look(model).shapes, count)
    reached = sum(len(group) - 1 for group in groups)
    if reached < count:
        raise ValueError(f"`count` {count}: masks allow at most {reached} layers to follow another")
    return groups


@torch.no_grad()
def _greedy(
    model: PreTrainedModel, ids: Tensor, taken: str, count: int, plan_of: Callable[[Groups], DepthPlan]
) -> list[int]:
    """Take layer after layer whatever turns the stream least, measured with those before it already gone.

    That is the mean cosine of the stream before and after what would go (`taken`: attention, or a layer).
    """
    sublayers, chosen, samples = look(model), [], {}

    def see(stream: LayerStream) -> None:
        after = stream.after_attention if taken == "attention" else stream.after
        if after is not None and stream.layer not in chosen:
            samples.setdefault(stream.layer, []).append(float(mean_cosine(stream.before, after)))

    while len(chosen) < count:
        samples.clear()
        changed = what_if(model, plan_of([[layer] for layer in chosen]), sublayers) if chosen else nullcontext()
        with changed, streams(model, see):
            for sequence in ids:
                model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model))
        chosen.append(max(samples, key=lambda layer: float(np.mean(samples[layer]))))
    return chosen

"""Which layers a method acts on: as named, the top half, or by what the model does on text.

Shapes: N sequences, B of a batch, T tokens, C hidden, H key-value heads, D head size, L layers, R rank.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans
from crosslayer.core.plan import DepthPlan, parse_layers
from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import Meter
from crosslayer.probe.intercept import AttentionCall, no_cache, visited
from crosslayer.probe.measures import mean_cosine, working
from crosslayer.probe.shapes import LayerShape, may_share
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.probe.what_if import find_sublayers, what_if
from crosslayer.verbs.diagnose.groups import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.verbs.diagnose.run import diagnose
from crosslayer.verbs.retrofit.convert import plain_decoder
from crosslayer.verbs.retrofit.moments import NEEDED, SMALLEST
from crosslayer.verbs.retrofit.request import Request
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.search import Kind
from crosslayer.verbs.retrofit.streams import Streams
from crosslayer.verbs.retrofit.trade_off import methods_by_damage

States = dict[int, tuple[Tensor, Tensor]]  # keys and values by layer, (H, T, D) each


def choose(
    model: PreTrainedModel, request: Request, windows: dict[str, Windows], progress: Meter
) -> tuple[list[Method], Choice]:
    """Return the methods with their layers, and what the record says of the choice.

    `windows` is text by purpose, as `Texts.parts` names them.
    """
    layers, kind, named = model.config.num_hidden_layers, request.kind, request.options.layers
    if request.whole is not None:
        find_sublayers(model).check(request.whole.plan(layers))
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
    find_sublayers(model).check(method.plan(layers))  # says which layers may not share, and why
    return [method], Choice(how=named, groups=groups)


def _top_half(model: PreTrainedModel, kind: Kind, size: int) -> Groups:
    """Return blocks from the last layer down within the top half; for a method on single layers, their followers."""
    blocks = paper_groups(find_sublayers(model).shapes, size)
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
        similarity = diagnose(model, ids, progress=progress).map_similarity_without_first  # (L, L)
        groups = similar_groups(similarity, find_sublayers(model).shapes, count)
        reached = sum(len(group) - 1 for group in groups)
        if reached < count:
            raise ValueError(f"`count` {count}: masks allow at most {reached} layers to follow another")
        return groups
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


@torch.no_grad()
def _greedy(
    model: PreTrainedModel, ids: Tensor, taken: str, count: int, plan_of: Callable[[Groups], DepthPlan]
) -> list[int]:
    """Take layer after layer whatever turns the stream least, measured with those before it already gone.

    That is the mean cosine of the stream before and after what would go (`taken`: attention, or a layer).
    """
    sublayers, chosen, samples = find_sublayers(model), [], {}

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


@torch.no_grad()
def dissimilar_groups(
    model: PreTrainedModel,
    ids: Tensor,
    plan_of: Callable[[Groups], DepthPlan],
    count: int,
    threshold: float,
    step: Callable[[int, int], None],
) -> Groups:
    """Return groups of layers whose cached states are most dissimilar, with `count` followers, on token ids (N, T).

    As arXiv 2410.18517 and its code have it: keys and values are averaged over sequences, position by position; two
    layers are as far apart as the mean over heads and positions of the Euclidean distances of their keys, and of their
    values, and half the sum of both. Pairs are tried from the farthest on. In each the upper layer follows the lower
    (or what that follows itself, and the upper layer's own followers come along). A pair stays if the last hidden
    states, all positions of a sequence as one vector, have a cosine to the original's above a threshold, in the mean
    over sequences.

    `plan_of` makes the wiring of groups of layers, `threshold` is the least cosine of the last hidden states to the
    original's, and `step` is called after each pair that is taken with (taken, `count`).
    """
    sublayers = find_sublayers(model)
    pairs = ranked_pairs(averaged_caches(model, ids), sublayers.shapes)
    original = [_last_hidden(model, sequence) for sequence in ids]
    leader: dict[int, int] = {}  # of each follower
    for upper, lower in pairs:
        if len(leader) == count:
            break
        if upper in leader:
            continue
        end = leader.get(lower, lower)  # nobody follows a follower
        candidate = {layer: end if other == upper else other for layer, other in leader.items()} | {upper: end}
        with what_if(model, plan_of(_groups(candidate)), sublayers):
            last = [_last_hidden(model, sequence) for sequence in ids]
        cosines = [functional.cosine_similarity(*pair, dim=0) for pair in zip(last, original, strict=True)]
        if float(torch.stack(cosines).mean()) > threshold:
            leader = candidate
            step(len(leader), count)
    if len(leader) < count:
        raise ValueError(
            f"`count` {count}: {len(leader)} layers can follow another with a cosine above `threshold` {threshold:g}; "
            "lower either"
        )
    return _groups(leader)


@torch.no_grad()
def averaged_caches(model: PreTrainedModel, ids: Tensor) -> States:
    """Return each layer's keys (after rotary embedding) and values, averaged over the sequences."""
    sums: States = {}

    def see(call: AttentionCall) -> None:
        keys, values = working(call.key[0]), working(call.value[0])
        if call.layer in sums:
            keys, values = sums[call.layer][0] + keys, sums[call.layer][1] + values
        sums[call.layer] = keys, values

    with visited(model, see):
        for sequence in ids:
            model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model))
    return {layer: (keys / len(ids), values / len(ids)) for layer, (keys, values) in sums.items()}


def ranked_pairs(states: States, shapes: Sequence[LayerShape | None]) -> list[tuple[int, int]]:
    """Return the pairs (upper, lower) of layers that may share, the farthest apart first."""
    distances = {}
    for upper in states:
        for lower in states:
            if lower < upper and may_share(shapes[upper], shapes[lower]):
                both = zip(states[upper], states[lower], strict=True)  # keys, and values
                distances[upper, lower] = float(sum((own - other).norm(dim=-1).mean() for own, other in both) / 2)
    return sorted(distances, key=lambda pair: -distances[pair])


def _groups(leader: dict[int, int]) -> Groups:
    """Return each leader with its followers, in rising order."""
    followers: dict[int, list[int]] = {}
    for layer in sorted(leader):
        followers.setdefault(leader[layer], []).append(layer)
    return [[first, *rest] for first, rest in sorted(followers.items())]


def _last_hidden(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Return what the final norm returns for a sequence (T,), as a single vector (T·C,)."""
    output = model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model))
    return working(output.last_hidden_state).flatten()


@torch.no_grad()
def error_bounds(model: PreTrainedModel, ids: Tensor, step: Callable[[int, int], None]) -> list[float]:
    """Return how much of what attention makes of the stream a linear map must leave, at most, of each layer, (L,).

        NMSE = E‖y − ŷ‖² / tr Cov(y)  ≤  rank Cov(y) − Σ ρ_i²,  ŷ = the linear map of x, with bias, that errs least

    x is the stream that enters a layer and y = x + Attn(Norm(x)) the stream after its attention; ρ_i are the singular
    values of Cov(x)^(−1/2) Cov(x, y) Cov(y)^(−1/2). With covariances of full rank this is Σ (1 − ρ_i²), by which
    arXiv 2505.21077 ranks layers; its code takes these x and y. W_c reads Norm(x), which the bound does not know.

    Memory: the stream at a single layer for all tokens, and second moments of that layer.
    """
    plain = plain_decoder(model)
    width, layers = plain.config.hidden_size, plain.config.num_hidden_layers
    if ids.numel() < NEEDED * width:
        raise ValueError(
            f"`select` correlation: calibration text has {ids.numel()} tokens; it needs at least {NEEDED * width} "
            f"({NEEDED} for each of the {width} channels of the stream)"
        )
    streams = Streams(plain, plain, ids, follow="converted")
    bounds = []
    for layer in range(layers):
        bounds.append(_bound(streams.around_attention(layer), width, streams.after[0].device))
        if layer < layers - 1:
            streams.advance(layer)
        step(layer + 1, layers)
    return bounds


def _bound(pairs: Iterable[tuple[Tensor, Tensor]], width: int, device: torch.device) -> float:
    """Return rank Cov(y) − Σ ρ_i², from batches of x and y, (B, T, C) each; in float64."""
    rows, total = 0, torch.zeros(2 * width, dtype=torch.float64, device=device)  # of x and y, (2C,)
    gram = torch.zeros(2 * width, 2 * width, dtype=torch.float64, device=device)
    for pair in pairs:
        both = torch.cat(pair, dim=-1).flatten(0, 1).double()  # (B·T, 2C)
        rows += len(both)
        total += both.sum(0)
        gram += both.T @ both
    covariance = gram / rows - torch.outer(total / rows, total / rows)
    left, _ = _whitening(covariance[:width, :width])
    right, rank = _whitening(covariance[width:, width:])
    correlations = torch.linalg.svdvals(left.T @ covariance[:width, width:] @ right).clamp(max=1)
    return rank - float(correlations.square().sum())


def _whitening(covariance: Tensor) -> tuple[Tensor, int]:
    """Return V with Vᵀ Cov V = 1 (C, R), and the rank R of the covariance (C, C)."""
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1] * SMALLEST
    return vectors[:, kept] * values[kept].rsqrt(), int(kept.sum())

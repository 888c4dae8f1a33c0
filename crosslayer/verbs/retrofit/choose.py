"""The choice of layers: as given, the top half, or by measurements on text.

Shapes: N sequences, B of a batch, T tokens, C hidden, H key-value heads, D head size, L layers.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.core.choice import ChoiceMethod
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans
from crosslayer.core.options import parse_layers
from crosslayer.core.plan import DepthPlan
from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import progress
from crosslayer.probe.groups import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.probe.intercept import AttentionCall, final_hidden, visited
from crosslayer.probe.measures import mean_cosine, working
from crosslayer.probe.shapes import LayerShape, may_share
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.probe.what_if import find_sublayers, what_if
from crosslayer.verbs.diagnose.run import diagnose
from crosslayer.verbs.retrofit.choosers import check_some_are_left_out, choosers_by_damage
from crosslayer.verbs.retrofit.convert import convert, plain_decoder
from crosslayer.verbs.retrofit.latents import StateMoments, levels_of, measure_moments, with_bits, with_errors
from crosslayer.verbs.retrofit.request import Request, RetrofitOptions
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.search import MethodClass
from crosslayer.verbs.retrofit.trade_off import methods_by_damage


class Chosen(NamedTuple):
    """The methods with their layers, the record of the choice and, for latents, moments of keys and values."""

    methods: list[Method]
    choice: Choice
    moments: list[StateMoments] | None = None


States = dict[int, tuple[Tensor, Tensor]]  # keys and values by layer, (H, T, D) each


def choose(model: PreTrainedModel, request: Request, windows: dict[str, Windows]) -> Chosen:
    """Return the methods with their layers, the record of the choice and, for latents, moments of keys and values.

    `windows` is text by purpose, as in `RetrofitTexts.window_counts`.
    """
    layers, cls, option = model.config.num_hidden_layers, request.method_class, request.options.layers
    if request.calibrates:
        return _latents(model, request, windows["calibration"])
    if request.searches_choosers:
        return Chosen(*choosers_by_damage(model, windows, request))
    if request.method is not None or request.methods:
        whole = request.methods if request.method is None else [request.method]
        methods = [_checked(method, model, request) for method in whole]
        find_sublayers(model).check(merge_plans(methods, layers))
        return Chosen(methods, Choice(how="as options"))
    if cls is None:
        return Chosen(*methods_by_damage(model, windows, request))
    if option == "auto":
        groups = _automatic(model, request, cls, windows["choice"])
    elif option == "top-half":
        groups = _top(model, cls, request.options)
    else:
        groups = parse_layers(option, layers)
    method = _checked(request.compensated(request.from_groups(groups, layers)), model, request)
    return Chosen([method], Choice(how=option, groups=groups))


def _checked(method: Method, model: PreTrainedModel, request: Request) -> Method:
    """Return the method; raise if the model's layers cannot share, or windows would not show the damage."""
    if isinstance(method, ChoiceMethod):
        check_some_are_left_out(method, request.options.length)
    find_sublayers(model).check(method.plan(model.config.num_hidden_layers))
    return method


def _latents(model: PreTrainedModel, request: Request, windows: Windows) -> Chosen:
    """Return a method whose layers cache latents, with bits for the budget, if there is one."""
    assert request.method is not None
    text, budget = windows.by_domain(), request.options.kv_budget
    plan = merge_plans([request.method], model.config.num_hidden_layers)
    plain, seed, levels = plain_decoder(model), request.options.seed, levels_of(request.axes)
    moments = measure_moments(plain, text, plan, seed)
    methods = with_bits([request.method], moments, budget, levels)
    rounded = convert(model, methods, moments=moments, share_weights=True).model
    assert isinstance(rounded, CrossLayerForCausalLM)
    moments = with_errors(rounded, moments, text, seed)
    how = "as options" if budget is None else f"bits for {budget:g} of the cache"
    return Chosen(with_bits([request.method], moments, budget, levels), Choice(how=how), moments)


def _top(model: PreTrainedModel, cls: MethodClass, options: RetrofitOptions) -> Groups:
    """Return blocks of layers from the last down; for a method on single layers, each without its first."""
    size, count = options.size, options.count
    blocks = paper_groups(find_sublayers(model).shapes, size, count and count // (size - 1))
    if count is not None and len(blocks) * (size - 1) < count:
        raise ValueError(f"`count` must be at most {len(blocks) * (size - 1)} for `size` {size}, got {count}")
    if not blocks:
        raise ValueError(
            f"the top half has no {size} consecutive layers with the same mask; give `layers` (groups with gaps: "
            "18+20,19+21)"
        )
    return blocks if cls.grouped else [[layer] for block in blocks for layer in block[1:]]


def _automatic(model: PreTrainedModel, request: Request, cls: MethodClass, windows: Windows) -> Groups:
    """Return layers chosen on text by the criterion of `select`."""
    ids, layers, options = windows.ids, model.config.num_hidden_layers, request.options
    count = options.count or max(1, layers // 2 // PAPER_SIZE * (PAPER_SIZE - 1))
    if count >= layers:
        raise ValueError(f"`count` must be below {layers}, the number of layers of the model, got {count}")

    def plan_of(groups: Groups) -> DepthPlan:
        if not groups:
            return DepthPlan.identity(layers)
        return merge_plans([request.from_groups(groups, layers)], layers)

    if request.select == "distance":
        with progress("choosing layers", count) as bar:
            return dissimilar_groups(model, ids, plan_of, count, options.threshold, bar.step)
    if cls.grouped:
        similarity = diagnose(model, ids).map_similarity_without_first  # (L, L)
        groups = similar_groups(similarity, find_sublayers(model).shapes, count)
        reached = sum(len(group) - 1 for group in groups)
        if reached < count:
            raise ValueError(
                f"`count` must be at most {reached}, since only layers with the same mask can share, got {count}"
            )
        return groups
    first = plan_of([[0]])
    if first.attends(0):
        raise ValueError("`layers` auto can choose attention or whole layers, not MLPs; give the layers, such as 4,7-9")
    sublayer = "attention" if first.mlps[0] is not None else "layer"
    if request.select == "greedy":
        chosen = _greedy(model, ids, sublayer, count, plan_of)
    else:
        diagnosis = diagnose(model, ids)
        similarity = diagnosis.attention_io_similarity if sublayer == "attention" else diagnosis.layer_io_similarity
        if request.select == "top-half-similarity":
            if count > layers - layers // 2:
                raise ValueError(f"`count` must be at most {layers - layers // 2}, the top half, got {count}")
            similarity = np.where(np.arange(layers) < layers // 2, -np.inf, similarity)
        chosen = np.argsort(-similarity, kind="stable")[:count]  # of (L,)
    return [[int(layer)] for layer in sorted(chosen)]


@torch.no_grad()
def _greedy(
    model: PreTrainedModel, ids: Tensor, sublayer: str, count: int, plan_of: Callable[[Groups], DepthPlan]
) -> list[int]:
    """Choose one layer after the other: the one that turns the stream least, with those chosen before already dropped.

    The criterion is the mean cosine of the stream before and after the sublayer ("attention" or "layer").
    """
    sublayers, chosen, samples = find_sublayers(model), [], {}

    def record(stream: LayerStream) -> None:
        after = stream.after_attention if sublayer == "attention" else stream.after
        if after is not None and stream.layer not in chosen:
            samples.setdefault(stream.layer, []).append(float(mean_cosine(stream.before, after)))

    while len(chosen) < count:
        samples.clear()
        changed = what_if(model, plan_of([[layer] for layer in chosen]), sublayers) if chosen else nullcontext()
        with changed, streams(model, record):
            for sequence in ids:
                final_hidden(model, sequence)
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
    """Return groups of layers whose cached states are most dissimilar, with `count` readers, on token ids (N, T).

    As in arXiv 2410.18517 and its code: keys and values are averaged over sequences, position by position; the distance
    of two layers is the Euclidean distance of their keys and of their values, averaged over both, heads and positions.
    Pairs are tried from the farthest on. In each the upper layer reads the lower one (or that layer's source, and the
    upper layer's own readers move along). A pair is kept if the last hidden states, all positions of a sequence as one
    vector, have a mean cosine to the original's above `threshold`.

    `plan_of` returns the plan of groups of layers; `step` is called after each kept pair with (kept, `count`).
    """
    sublayers = find_sublayers(model)
    pairs = ranked_pairs(averaged_caches(model, ids), sublayers.shapes)
    original = [_last_hidden(model, sequence) for sequence in ids]
    source_of: dict[int, int] = {}  # by reader
    for upper, lower in pairs:
        if len(source_of) == count:
            break
        if upper in source_of:
            continue
        source = source_of.get(lower, lower)  # a reader is no source
        candidate = {layer: source if other == upper else other for layer, other in source_of.items()}
        candidate[upper] = source
        with what_if(model, plan_of(_groups(candidate)), sublayers):
            last = [_last_hidden(model, sequence) for sequence in ids]
        cosines = [functional.cosine_similarity(*pair, dim=0) for pair in zip(last, original, strict=True)]
        if float(torch.stack(cosines).mean()) > threshold:
            source_of = candidate
            step(len(source_of), count)
    if len(source_of) < count:
        raise ValueError(
            f"`count` {count} cannot be reached: {len(source_of)} layers can share with a cosine above `threshold` "
            f"{threshold:g}; lower one of them"
        )
    return _groups(source_of)


@torch.no_grad()
def averaged_caches(model: PreTrainedModel, ids: Tensor) -> States:
    """Return each layer's keys (after rotary embedding) and values, averaged over the sequences."""
    sums: States = {}

    def record(call: AttentionCall) -> None:
        keys, values = working(call.key[0]), working(call.value[0])
        if call.layer in sums:
            keys, values = sums[call.layer][0] + keys, sums[call.layer][1] + values
        sums[call.layer] = keys, values

    with visited(model, record):
        for sequence in ids:
            final_hidden(model, sequence)
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


def _groups(source_of: dict[int, int]) -> Groups:
    """Return each source with its readers, in ascending order."""
    readers: dict[int, list[int]] = {}
    for layer in sorted(source_of):
        readers.setdefault(source_of[layer], []).append(layer)
    return [[first, *rest] for first, rest in sorted(readers.items())]


def _last_hidden(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Return the output of the final norm for a sequence (T,), as a single vector (T·C,)."""
    return working(final_hidden(model, sequence)).flatten()

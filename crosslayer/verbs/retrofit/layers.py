"""The choice of layers: as given, the top half, or by measurements on text.

Shapes: N sequences, B of a batch, T tokens, C hidden, H key-value heads, D head size, L layers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans
from crosslayer.core.options import check_choice, parse_layers
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
from crosslayer.verbs.retrofit.options import RetrofitOptions, read_layers
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.strategy import Chosen, Named, Strategy, no_effect

States = dict[int, tuple[Tensor, Tensor]]  # keys and values by layer, (H, T, D) each


class Layers(Strategy):
    """The layers of a method: as given, the top half, or chosen on text by a criterion."""

    acts = ("layers", "part")

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        (method,) = named
        assert isinstance(method, type)
        self.method, self.targets, self.layers = method, method.targets, read_layers(options.layers)
        self.part = options.part or next(iter(method.parts), None)  # what the method drops
        self.way, _, select = self.layers.name.partition(":")  # top-half, auto, or groups
        self.select = select or selects(method)[0]
        self.needs = ("choice",) if self.way == "auto" else ()
        super().__init__(options, named, config)

    def check(self, source: PreTrainedConfig, given: Mapping[str, Any]) -> None:
        """Raise for given options without effect, and for values that the method does not have."""
        readers, count = self.layers.size - 1, self.layers.count  # of a block, and of all
        if self.way == "auto":
            check_choice("`layers`", "auto", self.select, selects(self.method))
        elif (count or 0) % readers:
            raise ValueError(f"`layers`: count must be a multiple of size − 1 = {readers}, got {count}")
        if self.options.part is not None:
            if not self.method.parts:
                raise no_effect(f"`part` {self.part}")
            check_choice("retrofit", "part", self.part, self.method.parts)
        super().check(source, given)

    def choose(self, model: PreTrainedModel, windows: Mapping[str, Windows]) -> Chosen:
        """Return the method on its layers, with W_c."""
        layers = model.config.num_hidden_layers
        if self.way == "auto":
            groups = self._automatic(model, windows["choice"].ids)
        else:
            groups = self._top(model) if self.way == "top-half" else parse_layers(self.way, layers)
        method = self._checked(self.compensated(self.on(groups, layers)), model)
        return Chosen([method], Choice(how=self.way, groups=groups))

    def on(self, groups: Groups, layers: int) -> Method:
        """Return the method on groups of layers, without W_c."""
        return self.method.from_groups(groups, layers, **({} if self.part is None else {"part": self.part}))

    def _written(self) -> set[str | None]:
        return {self.asked.target or next(iter(self.targets), None)}

    def _default_fit(self) -> str:
        if self.part not in (None, *self.targets):
            return "none"  # W_c would have to write where the dropped part wrote
        return super()._default_fit()

    def _top(self, model: PreTrainedModel) -> Groups:
        """Return blocks of layers from the last down; for a method on single layers, each without its first."""
        size, count = self.layers.size, self.layers.count
        blocks = paper_groups(find_sublayers(model).shapes, size, count and count // (size - 1))
        most = len(blocks) * (size - 1)
        if count is not None and most < count:
            raise ValueError(f"`layers`: count must be at most {most} for size {size}, got {count}")
        if not blocks:
            raise ValueError(
                f"the top half has no {size} consecutive layers with the same mask; give `layers` (groups with gaps: "
                "18+20,19+21)"
            )
        return blocks if self.method.grouped else [[layer] for block in blocks for layer in block[1:]]

    def _automatic(self, model: PreTrainedModel, ids: Tensor) -> Groups:
        """Return layers chosen on token ids (N, T) by a criterion."""
        layers = model.config.num_hidden_layers
        count = self.layers.count or max(1, layers // 2 // PAPER_SIZE * (PAPER_SIZE - 1))
        if count >= layers:
            raise ValueError(f"`layers`: count must be below {layers}, the number of layers of the model, got {count}")

        def plan_of(groups: Groups) -> DepthPlan:
            if not groups:
                return DepthPlan.identity(layers)
            return merge_plans([self.on(groups, layers)], layers)

        if self.select == "distance":
            with progress("choosing layers", count) as bar:
                return dissimilar_groups(model, ids, plan_of, count, self.layers.threshold, bar.step)
        if self.method.grouped:
            similarity = diagnose(model, ids).map_similarity_without_first  # (L, L)
            groups = similar_groups(similarity, find_sublayers(model).shapes, count)
            reached = sum(len(group) - 1 for group in groups)
            if reached < count:
                why = "since only layers with the same mask can share"
                raise ValueError(f"`layers`: count must be at most {reached}, {why}, got {count}")
            return groups
        first = plan_of([[0]])
        if first.attends(0):
            raise ValueError(
                "`layers` auto can choose attention or whole layers, not MLPs; give the layers, such as 4,7-9"
            )
        sublayer = "attention" if first.mlps[0] is not None else "layer"
        if self.select == "greedy":
            chosen = _greedy(model, ids, sublayer, count, plan_of)
        else:
            diagnosis = diagnose(model, ids)
            similarity = diagnosis.attention_io_similarity if sublayer == "attention" else diagnosis.layer_io_similarity
            if self.select == "top-half-similarity":
                if count > layers - layers // 2:
                    raise ValueError(
                        f"`layers`: count must be at most {layers - layers // 2}, the top half, got {count}"
                    )
                similarity = np.where(np.arange(layers) < layers // 2, -np.inf, similarity)
            chosen = np.argsort(-similarity, kind="stable")[:count]  # of (L,)
        return [[int(layer)] for layer in sorted(chosen)]


def selects(method: type[Method]) -> tuple[str, ...]:
    """Return the criteria by which layers of a method can be chosen; the first is the default."""
    if not method.grouped:
        return "similarity", "top-half-similarity", "greedy"
    return ("similarity",) if method.consecutive else ("distance", "similarity")


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
            f"`layers`: count {count} cannot be reached: {len(source_of)} layers can share with a cosine above "
            f"threshold {threshold:g}; lower one of them"
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

"""Which layers a method acts on: as named, the top half, or by what the model does on text."""

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
from crosslayer.probe.what_if import Sublayers, look, what_if
from crosslayer.verbs.diagnose.groups import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.verbs.diagnose.run import diagnose
from crosslayer.verbs.retrofit.correlation import error_bounds
from crosslayer.verbs.retrofit.dissimilar import dissimilar_groups
from crosslayer.verbs.retrofit.record import Choice
from crosslayer.verbs.retrofit.request import Request
from crosslayer.verbs.retrofit.trade_off import methods_by_damage
from crosslayer.verbs.retrofit.wires import Kind

RANKED = ("attention", "layer")  # what may go by the similarity of what enters and leaves it


def choose(
    model: PreTrainedModel, request: Request, windows: dict[str, Windows], progress: Meter
) -> tuple[list[Method], Choice]:
    """Return the methods with their layers, and what the record says of the choice.

    Args:
        model: the original.
        request: what was asked for.
        windows: text by purpose; "search", "trade-off" and "calibration" for a budget, "choice" for automatic layers.
        progress: shows what is being done.

    Raises:
        ValueError: the layers may not share, or a budget cannot be met; the message says why.

    """
    layers = model.config.num_hidden_layers
    if request.whole is not None:
        look(model).check(request.whole.plan(layers))
        return [request.whole], Choice(how="as options")
    if request.kind is None:
        return methods_by_damage(model, windows, request, progress)
    named = request.options.layers
    if named == "auto":
        ids = windows["calibration" if request.many_tokens else "choice"].ids
        groups = Automatic(model, request, request.kind, progress).groups(ids)
    elif named == "top-half":
        groups = _top_half(model, request.kind, request.options.size)
    else:
        groups = parse_layers(named, layers)
    method = request.built(groups, layers)
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
    if kind.grouped:
        return blocks
    return [[layer] for block in blocks for layer in block[1:]]


class Automatic:
    """Layers by what the model does on text, in the way that the request selects."""

    def __init__(self, model: PreTrainedModel, request: Request, kind: Kind, progress: Meter):
        self.model, self.request, self.kind, self.progress = model, request, kind, progress
        self.layers = model.config.num_hidden_layers
        self.count = request.options.count or max(1, self.layers // 2 // PAPER_SIZE * (PAPER_SIZE - 1))

    def groups(self, ids: Tensor) -> Groups:
        """Return the layers, chosen on token ids (N, T)."""
        if self.count >= self.layers:
            raise ValueError(f"`count` {self.count}: the model has {self.layers} layers, and at least 1 must stay")
        if self.request.select == "distance":
            return self._dissimilar_states(ids)
        return self._similar_maps(ids) if self.kind.grouped else [[layer] for layer in sorted(self._single(ids))]

    def _dissimilar_states(self, ids: Tensor) -> Groups:
        def plan_of(groups: Groups) -> DepthPlan:
            return self.kind.from_groups(groups, self.layers).plan(self.layers)

        with self.progress("choosing layers", self.count) as bar:
            return dissimilar_groups(self.model, ids, plan_of, self.count, self.request.options.threshold, bar.step)

    def _single(self, ids: Tensor) -> list[int]:
        taken = self._what_goes()
        if taken not in RANKED:
            raise ValueError("`layers` auto ranks attention and whole layers; name the layers whose MLP goes")
        if self.request.select == "greedy":
            return self._greedy(ids, taken)
        if self.request.select == "similarity":
            return self._least_turning(ids, taken)
        if taken != "attention":
            raise ValueError("`select` correlation ranks attention; use similarity or greedy for whole layers")
        with self.progress("choosing layers", self.layers) as bar:
            bounds = error_bounds(self.model, ids, bar.step)
        return [int(layer) for layer in np.argsort(bounds, kind="stable")[: self.count]]

    def _similar_maps(self, ids: Tensor) -> Groups:
        similarity = diagnose(self.model, ids, progress=self.progress).map_similarity_without_first  # (L, L)
        groups = similar_groups(similarity, look(self.model).shapes, self.count)
        reached = sum(len(group) - 1 for group in groups)
        if reached < self.count:
            raise ValueError(f"`count` {self.count}: masks allow at most {reached} layers to follow another")
        return groups

    def _what_goes(self) -> str:
        """Return what a layer loses by the method: its attention, its MLP, or all of the layer."""
        plan = self._plan([0])
        if plan.attends(0):
            return "mlp"
        return "attention" if plan.mlps[0] is not None else "layer"

    def _plan(self, layers: list[int]) -> DepthPlan:
        if not layers:
            return DepthPlan.identity(self.layers)
        method = self.request.from_groups([[layer] for layer in layers], self.layers)
        return merge_plans([method], self.layers)

    def _least_turning(self, ids: Tensor, taken: str) -> list[int]:
        diagnosis = diagnose(self.model, ids, progress=self.progress)
        layers, attention = diagnosis.layer_io_similarity, diagnosis.attention_io_similarity
        similarity = attention if taken == "attention" else layers  # (L,)
        return [int(layer) for layer in np.argsort(-similarity, kind="stable")[: self.count]]

    @torch.no_grad()
    def _greedy(self, ids: Tensor, taken: str) -> list[int]:
        """Take layer after layer whatever turns the stream least, measured with those before it already gone."""
        sublayers, chosen = look(self.model), []
        while len(chosen) < self.count:
            cosines = _cosines(self.model, ids, taken, self._plan(chosen), sublayers)
            chosen.append(max((layer for layer in cosines if layer not in chosen), key=cosines.__getitem__))
        return chosen


def _cosines(
    model: PreTrainedModel, ids: Tensor, taken: str, plan: DepthPlan, sublayers: Sublayers
) -> dict[int, float]:
    """Return by layer the mean cosine of the stream before and after what would go, under a plan."""
    samples: dict[int, list[float]] = {}

    def see(stream: LayerStream) -> None:
        after = stream.after_attention if taken == "attention" else stream.after
        if after is not None:
            samples.setdefault(stream.layer, []).append(float(mean_cosine(stream.before, after)))

    whole = plan == DepthPlan.identity(plan.layers)
    with nullcontext() if whole else what_if(model, plan, sublayers), streams(model, see):
        for sequence in ids:
            model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model))
    return {layer: float(np.mean(cosines)) for layer, cosines in samples.items()}

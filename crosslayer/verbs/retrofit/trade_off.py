"""Meet a budget by measured damage, and measure the trade-off on text that was not searched.

A wiring that is bad as it stands may be nearly free once W_c makes up for it, so a search judges each wiring repaired.
A repair of a layer is fitted to what the original makes of its *own* stream, whatever else a wiring changes, so that it
is fitted once, when it is first asked for. The wiring that is chosen is then fitted from below, to its own streams.

Memory: what enters every layer of the original, for the tokens that are fitted to.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Method
from crosslayer.core.plan import STATES, DepthPlan
from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import Meter
from crosslayer.probe.shapes import LayerShape
from crosslayer.probe.what_if import find_sublayers
from crosslayer.verbs.diagnose.groups import PAPER_SIZE, Groups, paper_groups
from crosslayer.verbs.retrofit.cache import CacheShare
from crosslayer.verbs.retrofit.calibrate import fit_layer, fitted_layers, inputs
from crosslayer.verbs.retrofit.convert import convert_weights, plain_decoder
from crosslayer.verbs.retrofit.damage import compare, damage, difference, logits_of, losses
from crosslayer.verbs.retrofit.moments import REFITS, is_enough
from crosslayer.verbs.retrofit.request import Request
from crosslayer.verbs.retrofit.result import Choice, CurvePoint, FixedBlocks, SearchRecord
from crosslayer.verbs.retrofit.search import PASSES, Kind, Search, Wires
from crosslayer.verbs.retrofit.streams import Streams, layers_of

TOKENS = 8192  # that a repair is fitted to, or more where its inputs need them
POINTS = 5  # of the curve, at most


class Entering:
    """What enters each layer of a plain model, over some text: wirings run from the first layer that they change."""

    def __init__(self, plain: CrossLayerForCausalLM, ids: Tensor):
        self.plain = plain
        streams = Streams(plain, plain, ids, follow="converted")
        self.layers: list[list[Tensor]] = []  # of each layer the stream of each batch, (B, T, C)
        for layer in range(len(layers_of(plain))):
            self.layers.append([stream.clone() for stream in streams.after])
            streams.advance(layer)
        self.last = streams.after

    def at(self, layer: int, model: CrossLayerForCausalLM, follow: str) -> Streams:
        """Return the streams of the original and of a converted model where they enter a layer."""
        return Streams(self.plain, model, self.layers[layer], follow)

    def logits(self, model: CrossLayerForCausalLM) -> list[Tensor]:
        """Return the logits of a converted model, (T, V) of each sequence."""
        lowest, hidden = lowest_changed(model.config.plan), self.last
        if lowest < len(self.layers):
            streams = self.at(lowest, model, follow="converted")
            for layer in range(lowest, len(self.layers)):
                streams.advance(layer)
            hidden = streams.after
        return [model._logits(model.model.norm(each)) for each in torch.cat(hidden)]


class Repairs:
    """Repairs of single layers, each fitted when it is first asked for, and then known."""

    def __init__(self, plain: CrossLayerForCausalLM, text: Mapping[str, Tensor], fit: str, inputs: int):
        """Look at the original on token ids (N, T) of each domain; `fit` is as in calibrate.py, of so many inputs."""
        domains = _few(list(text.values()), fit, inputs)
        self.fit, self.sizes = fit, [len(ids) for ids in domains]
        self.entering = Entering(plain, torch.cat(domains))
        self.known: dict[tuple, dict[str, Tensor]] = {}

    def apply(self, model: CrossLayerForCausalLM) -> None:
        """Repair every layer of a converted model that has a W_c, or a W_o that is refitted."""
        for layer in fitted_layers(model, self.fit):
            reads = [model.config.plan.reads(state, layer) for state in STATES]
            wired = (layer, *reads, model.config.wiring.compensation[layer])
            block = layers_of(model)[layer]
            if wired in self.known:
                block.load_state_dict(self.known[wired], strict=False, assign=True)
            else:
                streams = self.entering.at(layer, model, follow="original")
                for source in sorted({source for read in reads for source in read} - {layer}):
                    lending = self.entering.at(source, model, follow="original")
                    lending.borrow(source)
                    both = zip(streams.carries, lending.carries, strict=True)
                    streams.carries = [{**own, **lent} for own, lent in both]
                fit_layer(streams, layer, self.fit, self.sizes)
                fitted = ("compensation", "o_proj")
                weights = block.state_dict().items()
                self.known[wired] = {name: one for name, one in weights if any(part in name for part in fitted)}


def _few(domains: list[Tensor], fit: str, inputs: int) -> list[Tensor]:
    """Return as few sequences of each domain, (N, T) each, as a repair needs."""
    length, most = domains[0].shape[1], max(len(ids) for ids in domains)
    for count in range(1, most):
        few = [ids[:count] for ids in domains]
        sizes = [len(ids) for ids in few]
        if sum(sizes) * length >= TOKENS and is_enough(inputs, sizes, length, fit):
            return few
    return domains


def lowest_changed(plan: DepthPlan) -> int:
    """Return the lowest layer that a plan changes, or whose states it lends; that above all layers if there is none."""
    own = DepthPlan.identity(plan.layers)
    touched = {plan.layers}
    for layer in range(plan.layers):
        reads = [plan.reads(state, layer) for state in STATES]
        if plan.mlps[layer] is None or reads != [own.reads(state, layer) for state in STATES]:
            touched |= {layer, *(source for read in reads for source in read)}
    return min(touched)


@torch.no_grad()
def methods_by_damage(
    model: PreTrainedModel, windows: Mapping[str, Windows], request: Request, progress: Meter
) -> tuple[list[Method], Choice]:
    """Return the methods that meet the request's budget, and what the record says of the choice.

    `windows` is text by purpose: "search", on which moves are measured, "trade-off", on which the curve is, and
    "calibration", to which repairs are fitted if the request fits anything.
    """
    options, shapes = request.options, find_sublayers(model).shapes
    with progress("reading the layers of the original", 0):
        measure = Measure(model, windows["search"], request, windows.get("calibration"))
    search = Search(measure, shapes, context=options.kv_context)
    expected = len(shapes) * len(search.kinds) * 3 // 2
    with progress(f"searching, about {expected} of at most {PASSES} wirings", expected) as bar:
        measure.step = lambda: bar.step(min(search.passes, expected), expected)
        chosen = search.run(options.kv_budget, options.kl_budget)
    methods = measure.methods(chosen)
    if not methods:
        raise ValueError(f"a damage of {options.kl_budget} nats allows no change: every single move costs more")
    curve, fixed = _measured(model, measure, search, windows["trade-off"], progress)
    record = SearchRecord(passes=search.passes, kinds=chosen.names(), curve=curve, fixed=fixed)
    return methods, Choice(how="search", search=record)


class Measure:
    """KL to the original of wirings whose layers are repaired, over text that ends as it began.

    Tokens that repeat earlier ones have half the weight: a model that can no longer look up what it has read loses
    hardly anything on ordinary text, and answers no question about it.
    """

    def __init__(self, model: PreTrainedModel, windows: Windows, request: Request, calibration: Windows | None = None):
        self.model, self.request = model, request
        self.ids, self.repeated = repeating(windows.ids)
        plain = plain_decoder(model)
        self.entering = Entering(plain, self.ids)
        self.original = self.entering.logits(plain)
        self.repairs = None
        if calibration is not None and request.fits:
            fit = request.fit if request.fit in REFITS else "layerwise"
            self.repairs = Repairs(plain, calibration.by_domain(), fit, inputs(plain.config, fit))
        self.step = lambda: None  # called after each measurement

    def methods(self, wires: Wires) -> list[Method]:
        """Return the methods that make the wires, with their W_c."""
        return [self.request.compensated(method) for method in wires.methods()]

    def candidate(self, methods: list[Method]) -> CrossLayerForCausalLM:
        """Return the model under these methods, repaired; what stays are the original's tensors."""
        candidate = convert_weights(self.model, methods).model
        assert isinstance(candidate, CrossLayerForCausalLM)
        if self.repairs is not None:
            self.repairs.apply(candidate)
        return candidate

    def __call__(self, wires: Wires) -> float:
        """Return the mean KL to the original of the repaired model over the windows, in nats a token."""
        logits = self.entering.logits(self.candidate(self.methods(wires)))
        divergences = []
        for ids, original, after in zip(self.ids, self.original, logits, strict=True):
            for part in (slice(self.repeated), slice(self.repeated, None)):
                _, _, kl = compare(original[part], after[part], ids[part])
                divergences.append(kl)
        self.step()
        return sum(divergences) / len(divergences)


def repeating(ids: Tensor) -> tuple[Tensor, int]:
    """Return windows (N, T) whose last third is what follows the first token once more, and where that begins."""
    begins = ids.shape[1] - ids.shape[1] // 3
    return torch.cat([ids[:, :begins], ids[:, 1 : ids.shape[1] - begins + 1]], dim=1), begins


def fixed_blocks(
    kind: Kind, shapes: Sequence[LayerShape | None], share: float, cache: CacheShare
) -> tuple[Groups, float] | None:
    """Return blocks of equal size in the top half, as arXiv 2502.00439 lays its superblocks, and their cached share.

    It is the size whose share is nearest to `share`, of two that are equally near the paper's; None where no two
    layers may share.
    """
    candidates = []
    for size in range(2, max(3, len(shapes) // 2 + 1)):
        groups = paper_groups(list(shapes), size)
        if groups:
            reached = cache.of(kind.from_groups(groups, len(shapes)).plan(len(shapes)))
            candidates.append((abs(reached - share), size != PAPER_SIZE, groups, reached))
    return min(candidates)[2:] if candidates else None


def _measured(
    model: PreTrainedModel, measure: Measure, search: Search, windows: Windows, progress: Meter
) -> tuple[list[CurvePoint], list[FixedBlocks]]:
    """Measure some picks, evenly spread, on unsearched windows, and fixed blocks beside the last; all are repaired."""
    step = max(1, math.ceil(len(search.curve[1:]) / POINTS))
    picks = search.curve[1:][::-1][::step][::-1]
    if not picks:
        return [], []
    reached, yardsticks = search.cache.of(picks[-1][0].plan), {}
    methods = {str(number): measure.methods(wires) for number, (wires, _) in enumerate(picks)}
    for kind in search.kinds:
        blocks = fixed_blocks(kind, search.shapes, reached, search.cache) if kind.grouped else None
        if blocks is not None:
            yardsticks[kind.name()] = blocks
            method = kind.from_groups(blocks[0], len(search.shapes))
            methods[kind.name()] = [measure.request.compensated(method)]
    runs = {name: logits_of(measure.candidate(chosen)) for name, chosen in methods.items()}
    with progress("measuring the trade-off on unseen text", len(windows)) as bar:
        measured = losses(logits_of(model), runs, windows, bar.step)
    curve, fixed = [], []
    for number, (wires, kl) in enumerate(picks):
        cost = damage(measured[str(number)])
        layers = {kind.name(): wires.kinds.count(kind) for kind in search.kinds}
        share = search.cache.of(wires.plan)
        curve.append(CurvePoint(share=share, kl_search=kl, kl=cost.kl, kl_ci95=cost.kl_ci95, layers=layers))
    for name, (groups, share) in yardsticks.items():
        cost = damage(measured[name])
        gap, interval = difference(measured[str(len(picks) - 1)], measured[name])
        found = {"kl": cost.kl, "kl_ci95": cost.kl_ci95, "search_minus_fixed": gap, "search_minus_fixed_ci95": interval}
        fixed.append(FixedBlocks(method=name, blocks=groups, share=share, **found))
    return curve, fixed

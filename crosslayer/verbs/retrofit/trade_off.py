"""Meet a budget by measured damage, and measure the trade-off on text that the search did not use.

A configuration that is bad without compensation may be nearly free with it, so the search compensates each before it
measures. There a layer is fitted on the original's *own* stream, independently of all other changes, so that each fit
is computed once and cached, with a single penalty. The chosen configuration is then fitted again from the first layer,
on its own streams.

Memory: the input of every layer of the original, for the tokens of these fits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Method
from crosslayer.core.plan import PASSED, STATES, DepthPlan
from crosslayer.corpus.windows import Windows, repeating
from crosslayer.judge.damage import damage, difference
from crosslayer.judge.losses import Run, compare, logits_of, losses
from crosslayer.output.progress import progress
from crosslayer.probe.groups import PAPER_SIZE, Groups, paper_groups
from crosslayer.probe.shapes import LayerShape
from crosslayer.probe.what_if import find_sublayers
from crosslayer.verbs.retrofit.cache import CacheShare
from crosslayer.verbs.retrofit.calibrate import fit_layer, fitted_layers, input_width
from crosslayer.verbs.retrofit.convert import convert_weights, plain_decoder
from crosslayer.verbs.retrofit.greedy import PASSES, TOO_SMALL
from crosslayer.verbs.retrofit.moments import REFITS, is_enough
from crosslayer.verbs.retrofit.options import RetrofitOptions
from crosslayer.verbs.retrofit.result import Choice, CurvePoint, MeasuredBaseline, SearchRecord
from crosslayer.verbs.retrofit.search import (
    QUICK_RANKED,
    RANKED,
    Assignment,
    MethodClass,
    Search,
    expected_passes,
    searched_methods,
)
from crosslayer.verbs.retrofit.strategy import Chosen, Named, Strategy
from crosslayer.verbs.retrofit.streams import Streams, layers_of

TOKENS = 8192  # of a fit during the search, or more where its inputs need them
FIT = 3  # about how many passes the fit of a layer takes
POINTS = 5  # at most, of the curve


class LayerInputs:
    """The input of each layer of a plain model on some text: converted models run from their first changed layer."""

    def __init__(self, plain: CrossLayerForCausalLM, ids: Tensor):
        self.plain = plain
        streams = Streams(plain, plain, ids, run_on="converted")
        self.layers: list[list[Tensor]] = []  # by layer and batch, (B, T, C)
        for layer in range(len(layers_of(plain))):
            self.layers.append([stream.clone() for stream in streams.after])
            streams.advance(layer)
        self.last = streams.after

    def at(self, layer: int, model: CrossLayerForCausalLM, run_on: str) -> Streams:
        """Return the streams of the original and of a converted model at the input of a layer."""
        return Streams(self.plain, model, self.layers[layer], run_on)

    def logits(self, model: CrossLayerForCausalLM) -> list[Tensor]:
        """Return the logits of a converted model, (T, V) of each sequence."""
        lowest, hidden = lowest_changed(model.config.plan), self.last
        if lowest < len(self.layers):
            streams = self.at(lowest, model, run_on="converted")
            for layer in range(lowest, len(self.layers)):
                streams.advance(layer)
            hidden = streams.after
        return [model._logits(model.model.norm(each)) for each in torch.cat(hidden)]


class FittedLayers:
    """Fitted W_c and W_o of single layers, each fitted at its first use and then cached."""

    def __init__(self, plain: CrossLayerForCausalLM, text: Mapping[str, Tensor], fit: str, width: int):
        """Run the original on token ids (N, T) of each domain; `fit` is as in calibrate.py, `width` its inputs."""
        domains = _subset(list(text.values()), fit, width)
        self.fit, self.sizes = fit, [len(ids) for ids in domains]
        self.inputs = LayerInputs(plain, torch.cat(domains))
        self.cache: dict[tuple, dict[str, Tensor]] = {}

    def apply(self, model: CrossLayerForCausalLM) -> None:
        """Set W_c, and W_o where it is refitted, in every layer of a converted model that has one."""
        for layer in fitted_layers(model, self.fit):
            reads = [model.config.plan.reads(state, layer) for state in STATES]
            key = (layer, *reads, model.config.wiring.compensation[layer])
            block = layers_of(model)[layer]
            if key in self.cache:
                block.load_state_dict(self.cache[key], strict=False, assign=True)
            else:
                streams = self.inputs.at(layer, model, run_on="original")
                for source in sorted({source for read in reads for source in read} - {layer}):
                    source_streams = self.inputs.at(source, model, run_on="original")
                    source_streams.compute_states(source)
                    both = zip(streams.carries, source_streams.carries, strict=True)
                    streams.carries = [{**own, **shared} for own, shared in both]
                fit_layer(streams, layer, self.fit, self.sizes, roughly=True)
                weights = block.state_dict().items()
                self.cache[key] = {
                    name: weight for name, weight in weights if "compensation" in name or "o_proj" in name
                }


def _subset(domains: list[Tensor], fit: str, width: int) -> list[Tensor]:
    """Return the first sequences of each domain, (N, T) each, as many as a fit needs."""
    length, most = domains[0].shape[1], max(len(ids) for ids in domains)
    for count in range(1, most):
        few = [ids[:count] for ids in domains]
        sizes = [len(ids) for ids in few]
        if sum(sizes) * length >= TOKENS and is_enough(width, sizes, length, fit):
            return few
    return domains


def lowest_changed(plan: DepthPlan) -> int:
    """Return the lowest layer that a plan changes or uses as a source; the number of layers if there is none."""
    own = DepthPlan.identity(plan.layers)
    touched = {plan.layers}
    for layer in range(plan.layers):
        reads = [plan.reads(state, layer) for state in PASSED]
        if plan.mlps[layer] is None or reads != [own.reads(state, layer) for state in PASSED]:
            touched |= {layer, *(source for read in reads for source in read)}
    return min(touched)


class LayerSearch(Strategy):
    """A budget of bytes or of KL chooses methods and their layers, by measured damage."""

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        self.targets = tuple(sorted({target for cls in searched_methods() for target in cls.targets}))
        self.needs = ("search",) if options.quick else ("search", "trade-off")
        self.most = QUICK_RANKED if options.quick else RANKED  # moves of the first ranking
        super().__init__(options, named, config)

    def forwarded(self, tokens: Mapping[str, int], layers: int) -> float:
        """Estimate how many tokens pass through a model; each configuration fits about a layer."""
        searched = expected_passes(layers, self.most)
        fitted = FIT * searched * min(TOKENS, tokens["calibration"]) / layers if self.fits else 0
        return super().forwarded(tokens, layers) + searched * tokens["search"] + fitted

    @torch.no_grad()
    def choose(self, model: PreTrainedModel, windows: Mapping[str, Windows]) -> Chosen:
        """Return the methods that meet the budget, and the course of the search."""
        options, shapes = self.options, find_sublayers(model).shapes
        with progress("running the original", 0):
            measure = Measure(model, windows["search"], self, windows.get("calibration"))
        search = Search(measure, shapes, context=options.kv_context, most=self.most)
        expected = expected_passes(len(shapes), self.most)
        with progress(f"searching, about {expected} of at most {PASSES} configurations", expected) as bar:
            measure.step = lambda: bar.step(min(search.passes, expected), expected)
            chosen = search.run(options.kv_budget, options.kl_budget)
        methods = measure.methods(chosen)
        if not methods:
            raise ValueError(TOO_SMALL.format(options.kl_budget))
        steps, baselines = _compared(measure, search)
        record = search_record(measure, search.passes, chosen.names(), steps, baselines, windows.get("trade-off"))
        return Chosen(methods, Choice(how="search", search=record))

    def _written(self) -> set[str | None]:
        return {self.asked.target or "attention"}


class Measure:
    """KL to the original of converted and compensated models, on text that ends by repeating its beginning.

    The repeated tokens have half the weight: a model that can no longer retrieve from its context loses hardly anything
    on ordinary text, but fails at every question about it.
    """

    def __init__(
        self, model: PreTrainedModel, windows: Windows, strategy: Strategy, calibration: Windows | None = None
    ):
        self.model, self.strategy = model, strategy
        self.ids, self.repeat_start = repeating(windows.ids)
        self.step = lambda: None  # called after each measurement
        plain = plain_decoder(model)
        self.inputs = LayerInputs(plain, self.ids)
        self.original = [logits.float().log_softmax(-1) for logits in self.inputs.logits(plain)]
        self.fitted_layers = None
        if calibration is not None and strategy.fits:
            fit = strategy.fit if strategy.fit in REFITS else "layerwise"
            self.fitted_layers = FittedLayers(plain, calibration.by_domain(), fit, input_width(plain.config, fit))

    def methods(self, assignment: Assignment) -> list[Method]:
        """Return the methods of an assignment, with their W_c."""
        return [self.strategy.compensated(method) for method in assignment.methods()]

    def candidate(self, methods: list[Method]) -> CrossLayerForCausalLM:
        """Return the converted and compensated model; kept weights are the original's tensors."""
        candidate = convert_weights(self.model, methods).model
        assert isinstance(candidate, CrossLayerForCausalLM)
        if self.fitted_layers is not None:
            self.fitted_layers.apply(candidate)
        return candidate

    def run(self, methods: list[Method]) -> Run:
        """Return a function from ids (B, T) to the logits (B, T, V) of the compensated model."""
        return logits_of(self.candidate(methods))

    def kl(self, methods: list[Method]) -> float:
        """Return the mean KL to the original over the windows, in nats/token."""
        logits, divergences = self.inputs.logits(self.candidate(methods)), []
        for ids, original, after in zip(self.ids, self.original, logits, strict=True):
            for rows in (slice(self.repeat_start), slice(self.repeat_start, None)):
                _, _, kl = compare(original[rows], after[rows], ids[rows])
                divergences.append(kl)
        self.step()
        return sum(divergences) / len(divergences)

    def __call__(self, assignment: Assignment) -> float:
        """Return the KL of an assignment, compensated."""
        return self.kl(self.methods(assignment))


def fixed_blocks(
    cls: MethodClass, shapes: Sequence[LayerShape | None], share: float, cache: CacheShare
) -> tuple[Groups, float] | None:
    """Return blocks of equal size in the top half, like the superblocks of arXiv 2502.00439, and their cached share.

    The size is the one whose share is nearest to `share`, the paper's in case of a tie; None if no layers may share.
    """
    candidates = []
    for size in range(2, max(3, len(shapes) // 2 + 1)):
        groups = paper_groups(list(shapes), size)
        if groups:
            reached = cache.of(cls.from_groups(groups, len(shapes)).plan(len(shapes)))
            candidates.append((abs(reached - share), size != PAPER_SIZE, groups, reached))
    return min(candidates)[2:] if candidates else None


class Step(NamedTuple):
    """A configuration of a search: its methods, the share that it takes, its KL on the search text."""

    methods: list[Method]
    share: float
    kl: float
    layers: dict[str, int]  # how many layers each method acts on


class Baseline(NamedTuple):
    """A configuration that no search was needed for: its methods, its groups of layers, the share that it takes."""

    methods: list[Method]
    groups: Groups
    share: float


def _compared(measure: Measure, search: Search) -> tuple[list[Step], dict[str, Baseline]]:
    """Return evenly spread steps of the search, and for the last one fixed blocks of each method."""
    steps = [
        Step(
            measure.methods(assignment),
            search.cache.of(assignment.plan),
            kl,
            {cls.name(): assignment.classes.count(cls) for cls in search.classes},
        )
        for assignment, kl in spread_steps(search.curve[1:])
    ]
    baselines = {}
    for cls in search.classes if steps else ():
        blocks = fixed_blocks(cls, search.shapes, steps[-1].share, search.cache) if cls.grouped else None
        if blocks is not None:
            method = measure.strategy.compensated(cls.from_groups(blocks[0], len(search.shapes)))
            baselines[cls.name()] = Baseline([method], *blocks)
    return steps, baselines


def spread_steps(curve: Sequence[Any]) -> list[Any]:
    """Return at most `POINTS` steps of a curve at equal distances, with the last."""
    stride = max(1, math.ceil(len(curve) / POINTS))
    return list(curve[::-1][::stride][::-1])


def search_record(
    measure: Measure,
    passes: int,
    names: list[str],
    steps: Sequence[Step],
    baselines: Mapping[str, Baseline],
    windows: Windows | None,
) -> SearchRecord:
    """Measure steps of a search, and each baseline against the last of them, on windows that it did not use, if any.

    `passes` is how many configurations the search measured, and `names` (L,) which method acts on each layer.
    """
    if windows is None:
        return SearchRecord(passes=passes, methods=names, curve=[], baselines=[])
    methods = {str(number): step.methods for number, step in enumerate(steps)}
    methods |= {name: baseline.methods for name, baseline in baselines.items()}
    runs = {name: measure.run(chosen) for name, chosen in methods.items()}
    measured = losses(logits_of(measure.model), runs, windows, "measuring the trade-off on held-out text")
    curve, compared = [], []
    for number, step in enumerate(steps):
        kl = damage(measured[str(number)]).kl
        curve.append(CurvePoint(share=step.share, kl_search=step.kl, kl=kl, layers=step.layers))
    for name, baseline in baselines.items():
        figures = {"kl": damage(measured[name]).kl, "change": difference(measured[str(len(steps) - 1)], measured[name])}
        compared.append(MeasuredBaseline(method=name, groups=baseline.groups, share=baseline.share, **figures))
    return SearchRecord(passes=passes, methods=names, curve=curve, baselines=compared)

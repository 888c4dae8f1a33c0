"""Meet a budget by measured damage, and measure the trade-off on text that was not searched."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Method
from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import Meter
from crosslayer.probe.what_if import look
from crosslayer.verbs.retrofit.blocks import Blocks, fixed_blocks
from crosslayer.verbs.retrofit.calibrate import inputs
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.damage import damage, difference
from crosslayer.verbs.retrofit.losses import Losses, compare, logits_of, losses
from crosslayer.verbs.retrofit.moments import REFITS
from crosslayer.verbs.retrofit.record import Choice, CurvePoint, FixedBlocks, SearchRecord
from crosslayer.verbs.retrofit.repairs import Entering, Repairs
from crosslayer.verbs.retrofit.request import Request
from crosslayer.verbs.retrofit.search import PASSES, Search
from crosslayer.verbs.retrofit.wires import Wires

POINTS = 5  # of the curve, at most


@torch.no_grad()
def methods_by_damage(
    model: PreTrainedModel, windows: Mapping[str, Windows], request: Request, progress: Meter
) -> tuple[list[Method], Choice]:
    """Return the methods that meet the request's budget, and what the record says of the choice.

    Args:
        model: the original.
        windows: text by purpose: "search", on which moves are measured, "trade-off", on which the curve is, and
            "calibration", to which repairs are fitted if the request fits anything.
        request: names the budget.
        progress: shows both.

    Raises:
        ValueError: the budget cannot be met; the message names the nearest.

    """
    options, shapes = request.options, look(model).shapes
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

    Attributes:
        step: called after each.

    """

    def __init__(self, model: PreTrainedModel, windows: Windows, request: Request, calibration: Windows | None = None):
        self.model, self.request = model, request
        self.ids, self.repeated = repeating(windows.ids)
        plain = convert(model, []).model
        assert isinstance(plain, CrossLayerForCausalLM)
        self.entering = Entering(plain, self.ids)
        self.original = self.entering.logits(plain)
        self.repairs = None
        if calibration is not None and request.fits:
            fit = request.fit if request.fit in REFITS else "layerwise"
            self.repairs = Repairs(plain, calibration.by_domain(), fit, inputs(plain.config, fit))
        self.step = lambda: None

    def methods(self, wires: Wires) -> list[Method]:
        """Return the methods that make the wires, with their W_c."""
        return [self.request.compensated(method) for method in wires.methods()]

    def candidate(self, methods: list[Method]) -> CrossLayerForCausalLM:
        """Return the model under these methods, repaired; what stays are the original's tensors."""
        candidate = convert(self.model, methods).model
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


def _measured(
    model: PreTrainedModel, measure: Measure, search: Search, windows: Windows, progress: Meter
) -> tuple[list[CurvePoint], list[FixedBlocks]]:
    """Measure the picks on the unsearched windows, and fixed blocks beside the last of them; all are repaired."""
    picks = _spread_out(search.curve[1:])
    if not picks:
        return [], []
    reached = search.cache.of(picks[-1][0].plan)
    candidates = [fixed_blocks(kind, search.shapes, reached, search.cache) for kind in search.kinds if kind.grouped]
    yardsticks = [blocks for blocks in candidates if blocks is not None]
    runs = {}
    for number, (wires, _) in enumerate(picks):
        runs[f"pick {number}"] = logits_of(measure.candidate(measure.methods(wires)))
    for blocks in yardsticks:
        method = measure.request.compensated(blocks.kind.from_groups(blocks.groups, len(search.shapes)))
        runs[blocks.kind.name()] = logits_of(measure.candidate([method]))
    with progress("measuring the trade-off on unseen text", len(windows)) as bar:
        measured = losses(logits_of(model), runs, windows, bar.step)
    curve = [_point(search, wires, kl, measured[f"pick {number}"]) for number, (wires, kl) in enumerate(picks)]
    last = measured[f"pick {len(picks) - 1}"]
    return curve, [_compared(blocks, measured[blocks.kind.name()], last) for blocks in yardsticks]


def _spread_out(picks: list[tuple[Wires, float]]) -> list[tuple[Wires, float]]:
    """Return at most `POINTS` of the picks, evenly spread, the last among them."""
    step = max(1, math.ceil(len(picks) / POINTS))
    return picks[::-1][::step][::-1]


def _point(search: Search, wires: Wires, kl: float, measured: Losses) -> CurvePoint:
    cost = damage(measured)
    return CurvePoint(
        share=search.cache.of(wires.plan),
        kl_search=kl,
        kl=cost.kl,
        kl_ci95=cost.kl_ci95,
        layers={kind.name(): wires.count(kind) for kind in search.kinds},
    )


def _compared(blocks: Blocks, measured: Losses, search: Losses) -> FixedBlocks:
    """Return the damage of fixed blocks, and by how much the search's wiring costs more."""
    cost = damage(measured)
    gap, interval = difference(search, measured)
    return FixedBlocks(
        method=blocks.kind.name(),
        blocks=blocks.groups,
        share=blocks.share,
        kl=cost.kl,
        kl_ci95=cost.kl_ci95,
        search_minus_fixed=gap,
        search_minus_fixed_ci95=interval,
    )

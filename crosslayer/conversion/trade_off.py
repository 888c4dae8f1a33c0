"""Meet a budget by measured damage, and measure the trade-off on text that was not searched."""

import math
import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.conversion.blocks import Blocks, fixed_blocks
from crosslayer.conversion.damage import damage, difference
from crosslayer.conversion.losses import Losses, compare, logits_if, logits_of, losses
from crosslayer.conversion.record import Choice, CurvePoint, FixedBlocks, SearchRecord
from crosslayer.conversion.request import Request
from crosslayer.conversion.search import PASSES, Search
from crosslayer.conversion.wires import Wires
from crosslayer.corpus.windows import Windows
from crosslayer.method import Method
from crosslayer.output.progress import Meter
from crosslayer.plan import DepthPlan
from crosslayer.probe.what_if import Sublayers, look

POINTS = 8  # of the curve, at most


@torch.no_grad()
def methods_by_damage(
    model: PreTrainedModel, searched: Windows, unseen: Windows, request: Request, progress: Meter
) -> tuple[list[Method], Choice]:
    """Return the methods that meet the request's budget, and what the record says of the choice.

    Args:
        model: the original.
        searched: text on which moves are measured.
        unseen: other text, on which the trade-off curve is measured.
        request: names the budget.
        progress: shows both.

    Raises:
        ValueError: the budget cannot be met; the message names the nearest.

    """
    options = request.options
    sublayers = look(model)
    measure = Measure(model, sublayers, searched)
    search = Search(measure, sublayers.shapes, context=options.kv_context)
    expected = len(sublayers.shapes) * len(search.kinds) * 3 // 2
    duration = expected * measure.seconds
    what = f"searching, about {expected} of at most {PASSES} forward passes, {duration:.0f} s"
    with progress(what, expected) as bar:
        bar.step(0, expected)
        measure.step = lambda passes: bar.step(min(passes, expected), expected)
        chosen = search.run(options.kv_budget, options.kl_budget)
    targets = {kind: request.target(kind) for kind in search.kinds}
    methods = [request.with_bias(method) for method in chosen.methods(targets)]
    if not methods:
        raise ValueError(f"a damage of {options.kl_budget} nats allows no change: every single move costs more")
    curve, fixed = _measured(model, sublayers, search, unseen, progress)
    record = SearchRecord(passes=search.passes, kinds=chosen.names(), curve=curve, fixed=fixed)
    return methods, Choice(how="search", search=record)


class Measure:
    """KL to the original over the search text, whose logits are kept."""

    def __init__(self, model: PreTrainedModel, sublayers: Sublayers, windows: Windows):
        self.model, self.sublayers, self.windows, self.passes = model, sublayers, windows, 0
        started = time.perf_counter()
        original = logits_of(model)
        self.original: list[Tensor] = [original(ids[None])[0] for ids in windows.ids]  # each (T, V)
        self.seconds = time.perf_counter() - started  # of a pass
        self.step = lambda passes: None

    def __call__(self, plan: DepthPlan) -> float:
        """Run the model as if wired by `plan` over the windows; return the mean KL, in nats a token."""
        run = logits_if(self.model, plan, self.sublayers)
        divergences = []
        for ids, original in zip(self.windows.ids, self.original, strict=True):
            _, _, kl = compare(original, run(ids[None])[0], ids)
            divergences.append(kl)
        self.passes += 1
        self.step(self.passes)
        return sum(divergences) / len(divergences)


def _measured(
    model: PreTrainedModel, sublayers: Sublayers, search: Search, windows: Windows, progress: Meter
) -> tuple[list[CurvePoint], list[FixedBlocks]]:
    """Measure the picks on the unsearched windows, and fixed blocks beside the last of them."""
    picks = _spread_out(search.curve[1:])
    if not picks:
        return [], []
    reached = search.cache.of(picks[-1][0].plan)
    candidates = [fixed_blocks(kind, sublayers.shapes, reached, search.cache) for kind in search.kinds if kind.grouped]
    yardsticks = [blocks for blocks in candidates if blocks is not None]
    runs = {f"pick {number}": logits_if(model, wires.plan, sublayers) for number, (wires, _) in enumerate(picks)}
    for blocks in yardsticks:
        runs[blocks.kind.name()] = logits_if(model, blocks.plan, sublayers)
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

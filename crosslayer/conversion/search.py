"""Meet a budget by measured damage: the greedy search, and its trade-off curve on text that was not searched."""

import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.conversion.choose import PASSES, SAVES, Search, Wires, fixed_superblocks
from crosslayer.conversion.damage import Losses, compare, damage, difference, logits_if, logits_of, losses
from crosslayer.conversion.request import Meter, Request
from crosslayer.corpus.windows import Windows
from crosslayer.method import Method
from crosslayer.methods import merge_plans
from crosslayer.methods.uniattn import UniAttn
from crosslayer.plan import DepthPlan
from crosslayer.probe.what_if import Wiring, look

POINTS = 8  # of the curve, at most


@torch.no_grad()
def plan_by_damage(
    model: PreTrainedModel, given: dict[str, Windows], request: Request, meter: Meter
) -> tuple[list[Method], dict[str, Any]]:
    """Return the methods that meet the request's budget, and what the record says of the choice.

    Raises:
        ValueError: the budget cannot be met; the message names the nearest.

    """
    wiring = look(model)
    measure = Measure(model, wiring, given["search"])
    search = Search(measure, wiring.shapes, context=request.kv_context)
    expected = len(wiring.shapes) * len(SAVES) * 3 // 2
    what = f"searching, about {expected} of at most {PASSES} forward passes, {expected * measure.seconds:.0f} s"
    with meter(what, expected) as bar:
        bar.step(0, expected)
        measure.step = lambda done: bar.step(min(done, expected), expected)
        chosen = search.run(request.kv_budget, request.kl_budget)
    methods = chosen.methods(request.writes)
    if not methods:
        raise ValueError(f"a damage of {request.kl_budget} nats allows no change: every single move costs more")
    curve, beside = _curve(model, wiring, search, given["trade-off"], meter)
    return methods, {"how": "search", "passes": search.passes, "kinds": chosen.kinds, "curve": curve, **beside}


class Measure:
    """KL to the original over the search text, whose logits are kept."""

    def __init__(self, model: PreTrainedModel, wiring: Wiring, windows: Windows):
        self.model, self.wiring, self.windows, self.passes = model, wiring, windows, 0
        started = time.perf_counter()
        self.original: list[Tensor] = [logits_of(model)(ids[None].to(model.device))[0] for ids in windows.ids]
        self.seconds = time.perf_counter() - started  # of one pass
        self.step = lambda done: None

    def __call__(self, plan: DepthPlan) -> float:
        """Run the model as if wired by `plan` over the windows; return the mean KL, in nats a token."""
        run = logits_if(self.model, plan, self.wiring)
        pairs = zip(self.windows.ids, self.original, strict=True)
        found = [compare(original, run(ids[None].to(self.model.device))[0], ids)[2] for ids, original in pairs]
        self.passes += 1
        self.step(self.passes)
        return sum(found) / len(found)


def _curve(
    model: PreTrainedModel, wiring: Wiring, search: Search, windows: Windows, meter: Meter
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure the picks, and the paper's fixed superblocks beside them, on the unsearched windows."""
    picks = search.curve[1:]
    step = max(1, -(-len(picks) // POINTS))
    points = list(reversed(picks[::-1][::step]))  # the last is always there
    if not points:
        return [], {}
    runs = {str(i): logits_if(model, wires.plan, wiring) for i, (wires, _) in enumerate(points)}
    fixed = fixed_superblocks(wiring.shapes, search.cache.of(points[-1][0].plan), search.cache)
    if fixed is not None:
        plan = merge_plans([UniAttn(tuple(map(tuple, fixed[0])))], len(wiring.shapes))
        runs["paper"] = logits_if(model, plan, wiring)
    with meter("measuring the trade-off on unseen text", len(windows)) as bar:
        found = losses(logits_of(model), runs, windows, bar.step)
    curve = [_point(wires, kl, found[str(i)], search) for i, (wires, kl) in enumerate(points)]
    if fixed is None:  # no two layers of the top half may share
        return curve, {}
    gap, interval = difference(found[str(len(points) - 1)], found["paper"])
    paper = {
        "superblocks": fixed[0],
        "share": fixed[1],
        "kl": float(found["paper"].kl.mean()),
        "kl_ci95": damage(found["paper"]).kl_ci95,
        "search_minus_paper": gap,
        "ci95": interval,
    }
    return curve, {"paper": paper}


def _point(wires: Wires, kl: float, found: Losses, search: Search) -> dict[str, Any]:
    counts = {kind: wires.kinds.count(kind) for kind in SAVES}
    measured = damage(found)
    share = search.cache.of(wires.plan)
    return {"share": share, "kl_search": kl, "kl": measured.kl, "kl_ci95": measured.kl_ci95, **counts}

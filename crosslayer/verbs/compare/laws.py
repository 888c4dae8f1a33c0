"""Power laws over settings: of the final loss by size or tokens, and of critical points by length.

    L = A · C^−α, fitted as a straight line of log L over log C

Source: Attention Residuals (arXiv 2603.15031), scaling laws; arXiv 2410.17897, Fig. 1.
Shapes: P points, K settings, S seeds that all of them have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from crosslayer.stats import Interval
from crosslayer.stats.means import FEWEST, t_interval, t_quantile
from crosslayer.verbs.compare.read import Sorted
from crosslayer.verbs.compare.record import COSTS, ComparedRun, Cost, Law, LengthTrend, Outcome, Setting

SCALED = ("model.", "schedule.", "budget", "train.", "eval.")  # keys that may differ between the sizes of a law
ALONG = ("data.length", "schedule.", "budget", "train.", "eval.")  # and between the lengths of a trend
APART = 1.5  # the least factor between neighbours in cost: closer ones say nothing of how the loss falls
CLOSE = 1 + 1e-6  # the largest cost, give or take rounding
FARTHEST = 1000  # times a cost at which a law says anything
Side = dict[int, list[ComparedRun]]  # seed → its runs, setting by setting


@dataclass(frozen=True)
class PowerLaw:
    """L = scale · C^−exponent; intervals are of 95 %, by Student's t, and missing with two points.

    They hold where the logarithms of the losses scatter evenly about the line; a curve that bends has none.
    """

    scale: float
    exponent: float
    exponent_interval: Interval | None
    smallest: float
    largest: float

    def loss(self, cost: float) -> float:
        """Return the loss at a cost."""
        return self.scale * cost**-self.exponent


def fit_power_law(costs: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Return the law through P points of costs (parameters, tokens, FLOPs) and losses, all positive."""
    if len(costs) != len(losses) or len(set(costs)) < 2:
        raise ValueError(f"a power law needs two different costs, each with its loss; got {len(set(costs))}")
    if not all(np.isfinite(value) and value > 0 for value in (*costs, *losses)):
        raise ValueError("a power law needs costs and losses above 0")
    line: Any = stats.linregress(np.log(costs), np.log(losses))
    interval = None
    if len(costs) >= FEWEST:  # two lie on a line
        half = t_quantile(len(costs) - 2) * float(line.stderr)
        interval = (-line.slope - half, -line.slope + half)
    return PowerLaw(float(np.exp(line.intercept)), float(-line.slope), interval, min(costs), max(costs))


def relative_cost(method: PowerLaw, baseline: PowerLaw, cost: float) -> float | None:
    """Return the method's cost over the baseline's, for the loss that the baseline has at `cost`: below 1 it saves.

    None where the method's law does not fall, or reaches that loss nowhere near: at less or more than a thousandth or a
    thousand times the cost.
    """
    if method.exponent <= 0:
        return None
    logarithm = math.log(method.scale / baseline.loss(cost)) / method.exponent - math.log(cost)
    return math.exp(logarithm) if abs(logarithm) < math.log(FARTHEST) else None


def laws(runs: Sorted, baseline: str) -> tuple[tuple[Law, ...], str | None]:
    """Return the law of each variant, or why there is none; the baseline's comes first.

    Settings belong together if they differ in model, schedule and arguments alone.
    """
    lines: list[Law] = []
    reason = "it needs two sizes of the model, or two numbers of tokens, with sequences of the same length"
    for where, names in _groups(runs.settings, SCALED).items():
        if len(names) < 2:
            continue
        sides = {variant.label: _side(runs, names, variant.label) for variant in runs.variants}
        if not sides[baseline]:
            reason = f"no seed of {baseline} has run in all of the settings"
            continue
        row = next(iter(sides[baseline].values()))
        cost = _cost(row)
        if not _apart(_costs(row, cost)):
            each = ", ".join(f"{value:.4g}" for value in _costs(row, cost))
            reason = (
                f"the runs of {baseline} cost {each} {COSTS[cost]}, and a law needs a factor of {APART} between them"
            )
            continue
        for label in (baseline, *(label for label in sides if label != baseline)):
            law = _law(sides[label], sides[baseline], cost)
            lines += [] if law is None else [Law(variant=label, where=where, settings=names, cost=cost, **law)]
    return tuple(lines), None if lines else reason


def _groups(settings: Sequence[Setting], free: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return labels of settings that differ at most in keys which begin so, by what they have in common."""
    groups: dict[str, tuple[str, ...]] = {}
    for setting in settings:
        fixed = {key: value for key, value in setting.values.items() if not key.startswith(free)}
        common = Setting.of(fixed).label
        groups[common] = (*groups.get(common, ()), setting.label)
    return groups


def _side(runs: Sorted, settings: Sequence[str], variant: str) -> Side:
    """Return the runs of a variant by seed, of the seeds that all settings have."""
    own = {(run.setting, run.seed): run for run in runs.runs if run.variant == variant}
    whole = [seed for seed in runs.seeds if all((setting, seed) in own for setting in settings)]
    return {seed: [own[setting, seed] for setting in settings] for seed in whole}


def _cost(row: Sequence[ComparedRun]) -> Cost:
    """Return what differs between runs of a law (K,): parameters alone, tokens alone, or both, which FLOPs sum."""
    parameters, tokens = {run.parameters for run in row}, {run.tokens for run in row}
    if len(tokens) == 1 and len(parameters) == len(row):
        return "parameters"
    return "tokens" if len(parameters) == 1 and len(tokens) == len(row) else "flops"


def _apart(costs: Sequence[float]) -> bool:
    """Return whether each of the costs (K,) is at least `APART` times the next lower one."""
    return all(higher >= APART * lower for lower, higher in pairwise(sorted(costs)))


def _costs(row: Sequence[ComparedRun], cost: Cost) -> list[float]:
    if cost == "flops":
        return [run.flops_per_token * run.tokens for run in row]
    return [float(run.parameters if cost == "parameters" else run.tokens) for run in row]


def _law(side: Side, baseline: Side, cost: Cost) -> dict[str, Any] | None:
    """Return the law of a variant; None where it has no seed in all settings, or costs that are too close."""
    seeds = [seed for seed in side if seed in baseline]
    if not seeds or not _apart(_costs(side[seeds[0]], cost)):
        return None

    def fit(runs: Side, seeds: Sequence[int]) -> tuple[PowerLaw, list[float]]:
        losses = np.mean([[run.final_loss for run in runs[seed]] for seed in seeds], axis=0).tolist()  # (K,)
        return fit_power_law(_costs(runs[seeds[0]], cost), losses), losses

    (law, losses), (reference, _) = fit(side, seeds), fit(baseline, seeds)
    each = [(fit(side, [seed])[0], fit(baseline, [seed])[0]) for seed in seeds]
    needed, interval = None, None
    if law.exponent > 0 and reference.exponent > 0:
        needed = relative_cost(law, reference, reference.largest)
    if needed is not None:  # 1 − the geometric mean of what the seeds need; no interval where one needs none at all
        by_seed = [relative_cost(own, other, other.largest) for own, other in each]
        known = [math.log(value) for value in by_seed if value is not None]
        ends = t_interval(known) if len(known) == len(by_seed) else None
        interval = None if ends is None else (1 - math.exp(ends[1]), 1 - math.exp(ends[0]))
    return {
        "costs": _costs(side[seeds[0]], cost),
        "losses": losses,
        "scale": law.scale,
        "exponent": law.exponent,
        "exponent_interval": law.exponent_interval,
        "exponent_over_seeds": t_interval([own.exponent for own, _ in each]),
        "fewer": None if needed is None else 1 - needed,
        "fewer_interval": interval,
        "extrapolated": needed is not None and not law.smallest <= needed * reference.largest <= law.largest * CLOSE,
    }


def trends(runs: Sorted, results: Sequence[Outcome]) -> tuple[LengthTrend, ...]:
    """Return how many tokens it takes to overtake each variant by the length of a sequence, where it is in two lengths.

    Settings belong together if they differ in length, schedule and arguments alone. The trend is continued to twice the
    longest length.
    """
    lengths = {run.setting: run.length for run in runs.runs}
    batches = {run.setting: run.tokens / run.steps for run in runs.runs}  # tokens of a step
    lines = []
    for where, names in _groups(runs.settings, ALONG).items():
        for variant in runs.variants:
            reached = {
                lengths[result.setting]: result.critical.mean * batches[result.setting]
                for result in results
                if result.variant == variant.label and result.setting in names
                if result.overtaken and result.critical is not None and result.critical.mean is not None
            }
            if len(reached) < 2:
                continue
            reached = dict(sorted(reached.items()))
            law = fit_power_law([*map(float, reached)], [*reached.values()])
            interval, following = law.exponent_interval, 2 * max(reached)
            lines.append(
                LengthTrend(
                    variant=variant.label,
                    where=where,
                    lengths=tuple(reached),
                    tokens=tuple(reached.values()),
                    exponent=-law.exponent,
                    interval=None if interval is None else (-interval[1], -interval[0]),
                    next_length=following,
                    next_tokens=law.loss(following),
                )
            )
    return tuple(lines)

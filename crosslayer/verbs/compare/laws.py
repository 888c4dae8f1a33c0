"""Power laws over configurations: final loss by size or tokens.

    L = A · C^−α, fitted as a straight line of log L over log C

Source: Attention Residuals (arXiv 2603.15031), scaling laws; arXiv 2410.17897, Fig. 1.
Shapes: P points, K configurations, S seeds shared by all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from crosslayer.stats.differences import FEWEST, t_mean, t_quantile
from crosslayer.stats.estimate import Estimate
from crosslayer.verbs.compare.read import Sorted
from crosslayer.verbs.compare.result import COSTS, ComparedRun, Configuration, Cost, Law

SCALED = (
    "model.",
    "schedule.",
    "budget",
    "train.",
    "eval.",
)  # keys that may differ between the configurations of a law
APART = 1.5  # the smallest factor between neighboring costs: an exponent from closer ones would be noise
CLOSE = 1 + 1e-6  # tolerance of the largest cost for rounding
FARTHEST = 1000  # the largest factor between a cost and the cost to which a law is extrapolated
RunsBySeed = dict[int, list[ComparedRun]]  # seed → its run in each configuration


@dataclass(frozen=True)
class PowerLaw:
    """L = scale · C^−exponent, with a 95% Student-t interval of the exponent from three points on.

    The interval assumes that log losses scatter evenly about the line, which they do not where the curve bends.
    """

    scale: float
    exponent: Estimate
    smallest: float
    largest: float

    def loss(self, cost: float) -> float:
        """Return the loss at a cost."""
        return self.scale * cost**-self.exponent.value


def fit_power_law(costs: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Fit a law to the costs (parameters, tokens, FLOPs) and losses of P points, all positive."""
    if len(costs) != len(losses) or len(set(costs)) < 2:
        raise ValueError(f"a power law needs at least two different costs, each with its loss, got {len(set(costs))}")
    if not all(np.isfinite(value) and value > 0 for value in (*costs, *losses)):
        raise ValueError("a power law needs costs and losses above 0")
    line: Any = stats.linregress(np.log(costs), np.log(losses))
    value, low, high = -line.slope, None, None
    if len(costs) >= FEWEST:  # two points always lie on a line
        half = t_quantile(len(costs) - 2) * line.stderr
        low, high = value - half, value + half
    exponent = Estimate(value=value, low=low, high=high, n=len(costs), over="configurations", how="Student's t")
    return PowerLaw(float(np.exp(line.intercept)), exponent, min(costs), max(costs))


def relative_cost(method: PowerLaw, baseline: PowerLaw, cost: float) -> float | None:
    """Return the method's cost over the baseline's for the same loss, that of the baseline at `cost`; below 1 it saves.

    None if the method's law does not fall, or reaches that loss only beyond a thousandth or a thousand times the cost.
    """
    if method.exponent.value <= 0:
        return None
    logarithm = math.log(method.scale / baseline.loss(cost)) / method.exponent.value - math.log(cost)
    return math.exp(logarithm) if abs(logarithm) < math.log(FARTHEST) else None


def laws(runs: Sorted, baseline: str) -> tuple[tuple[Law, ...], str | None]:
    """Return the law of each variant, the baseline's first, or the reason why there is none.

    A law goes through configurations that differ only in model, schedule, training arguments and evaluation.
    """
    lines: list[Law] = []
    reason = "it needs two model sizes or two numbers of training tokens, at the same sequence length"
    for where, names in _groups(runs.configurations).items():
        if len(names) < 2:
            continue
        measured = {variant.label: _runs_by_seed(runs, names, variant.label) for variant in runs.variants}
        if not measured[baseline]:
            reason = f"no seed of {baseline} has a run in every configuration"
            continue
        row = next(iter(measured[baseline].values()))
        cost = _cost(row)
        if not _apart(_costs(row, cost)):
            each = ", ".join(f"{value:.4g}" for value in _costs(row, cost))
            reason = (
                f"costs must differ by a factor of {APART} or more, got {each} {COSTS[cost]} for the runs of {baseline}"
            )
            continue
        for label in (baseline, *(label for label in measured if label != baseline)):
            law = _law(measured[label], measured[baseline], cost)
            lines += [] if law is None else [Law(variant=label, where=where, configurations=names, cost=cost, **law)]
    return tuple(lines), None if lines else reason


def _groups(configurations: Sequence[Configuration]) -> dict[str, tuple[str, ...]]:
    """Group the labels of configurations that may differ in a law, by the keys that they share."""
    groups: dict[str, tuple[str, ...]] = {}
    for configuration in configurations:
        fixed = {key: value for key, value in configuration.values.items() if not key.startswith(SCALED)}
        common = Configuration.of(fixed).label
        groups[common] = (*groups.get(common, ()), configuration.label)
    return groups


def _runs_by_seed(runs: Sorted, configurations: Sequence[str], variant: str) -> RunsBySeed:
    """Return the runs of a variant, for the seeds that have a run in every configuration."""
    own = {(run.configuration, run.seed): run for run in runs.runs if run.variant == variant}
    complete = [seed for seed in runs.seeds if all((configuration, seed) in own for configuration in configurations)]
    return {seed: [own[configuration, seed] for configuration in configurations] for seed in complete}


def _cost(row: Sequence[ComparedRun]) -> Cost:
    """Return the cost that differs between the runs of a law (K,): parameters, tokens, or FLOPs if both differ."""
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


def _law(variant: RunsBySeed, baseline: RunsBySeed, cost: Cost) -> dict[str, Any] | None:
    """Return the law of a variant; None if no seed has a run in every configuration, or if costs are too close."""
    seeds = [seed for seed in variant if seed in baseline]
    if not seeds or not _apart(_costs(variant[seeds[0]], cost)):
        return None

    def fit(runs: RunsBySeed, seeds: Sequence[int]) -> tuple[PowerLaw, list[float]]:
        losses = np.mean([[run.final_loss for run in runs[seed]] for seed in seeds], axis=0).tolist()  # (K,)
        return fit_power_law(_costs(runs[seeds[0]], cost), losses), losses

    (law, losses), (reference, _) = fit(variant, seeds), fit(baseline, seeds)
    each = [(fit(variant, [seed])[0], fit(baseline, [seed])[0]) for seed in seeds]
    needed, fewer = None, None
    if reference.exponent.value > 0:
        needed = relative_cost(law, reference, reference.largest)
    if needed is not None:  # 1 − the geometric mean over seeds; no interval if a seed never reaches the loss
        by_seed = [relative_cost(own, other, other.largest) for own, other in each]
        logs = [math.log(cost) for cost in by_seed if cost is not None]
        mean = t_mean(logs if len(logs) == len(by_seed) else [math.log(needed)])
        fewer = mean.mapped(lambda log: 1 - math.exp(log)).model_copy(update={"value": 1 - needed})
    return {
        "costs": _costs(variant[seeds[0]], cost),
        "losses": losses,
        "scale": law.scale,
        "exponent": law.exponent,
        "exponent_over_seeds": t_mean([own.exponent.value for own, _ in each]),
        "fewer": fewer,
        "extrapolated": needed is not None and not law.smallest <= needed * reference.largest <= law.largest * CLOSE,
    }

"""Each variant compared with the baseline in every configuration (final loss, curve, critical point), and power laws.

    L = A · C^−α, fitted as a straight line of log L over log C, over configurations that differ in size or tokens

Source: arXiv 2410.17897, section 4.1.2 (relative training loss), Fig. 14 (critical point) and Fig. 1 (laws); Attention
Residuals (arXiv 2603.15031), scaling laws.
Shapes: S pairs (seeds with a run of both), N logged steps; P points, K configurations, S seeds shared by all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from crosslayer.stats import t_quantile
from crosslayer.stats.differences import FEWEST, holm, paired_difference, seeds_needed, t_ends, t_mean
from crosslayer.stats.estimate import Estimate
from crosslayer.stats.times import TimeComparison
from crosslayer.verbs.compare.read import GroupedRuns
from crosslayer.verbs.compare.result import (
    COSTS,
    RELEVANT,
    SHORTEST,
    ComparedRun,
    Configuration,
    Cost,
    CriticalPoints,
    Difference,
    Law,
    Outcome,
    RelativeCurve,
)
from crosslayer.verbs.compare.speedup import speedup

# By default a curve is smoothed over 1/20 of its length, which delays a critical point by half of that.
SHARE = 20
# keys that may differ between the configurations of a law
SCALED = ("model.", "schedule.", "train.", "eval.")
# The smallest factor between neighboring costs: an exponent from closer ones would be noise. Through FLOPs that were
# equal but for rounding, a law once had an exponent of −34.
APART = 1.5
CLOSE = 1 + 1e-6  # tolerance of the largest cost for rounding
# The largest factor between a cost and the cost to which a law is extrapolated: one that hardly falls reaches another
# loss only far from every cost that was run.
FARTHEST = 1000
RunsBySeed = dict[int, list[ComparedRun]]  # seed → its run in each configuration


def outcomes(
    runs: GroupedRuns, baseline: str, smooth: int | None, times: Mapping[tuple[str, str], TimeComparison] | None = None
) -> tuple[Outcome, ...]:
    """Return each variant compared with the baseline in each configuration; curves are smoothed over `smooth` steps.

    `times` are those of a training step, by the labels of configuration and variant.
    """
    grouped: dict[tuple[str, str], dict[int, ComparedRun]] = {}
    for run in runs.runs:
        grouped.setdefault((run.configuration, run.variant), {})[run.seed] = run
    results = []
    for configuration in runs.configurations:
        reference = grouped.get((configuration.label, baseline), {})
        for variant in runs.variants:
            key = (configuration.label, variant.label)
            if variant.label != baseline and key in grouped:
                results.append(_outcome(grouped[key], reference, smooth, (times or {}).get(key)))

    # The correction is over all comparisons of the page: of many variants, one is lower by chance.
    p_values = {index: each.final.change.p for index, each in enumerate(results) if each.final}
    tested = {index: p for index, p in p_values.items() if p is not None}
    for index, p in zip(tested, holm([*tested.values()]), strict=True):
        results[index] = results[index].model_copy(update={"adjusted": p})
    return tuple(results)


def _outcome(
    runs: dict[int, ComparedRun],
    reference: dict[int, ComparedRun],
    smooth: int | None,
    step_time: TimeComparison | None,
) -> Outcome:
    """Compare the runs of a variant by seed with those of the baseline."""
    first = next(iter(runs.values()))
    # The seed sets the initial weights and the order of the text, so only runs with the same seed are a pair.
    seeds = sorted(runs.keys() & reference.keys())
    candidates = [runs[seed] for seed in seeds]
    baselines = [reference[seed] for seed in seeds]
    final, domains = None, {}
    if seeds:
        final = _difference(*([run.final_loss for run in group] for group in (candidates, baselines)))
        for name in candidates[0].losses:
            domains[name] = _difference(*([run.losses[name] for run in group] for group in (candidates, baselines)))
    curve, critical = _curve(candidates, baselines, smooth)
    return Outcome(
        configuration=first.configuration,
        variant=first.variant,
        seeds=tuple(seeds),
        missing=tuple(sorted(runs.keys() ^ reference.keys())),
        loss=float(np.mean([run.final_loss for run in candidates])) if candidates else None,
        final=final,
        adjusted=None,
        domains=domains,
        seeds_needed=None if final is None else seeds_needed(final.values, RELEVANT),
        curve=curve,
        critical=critical,
        step_time=step_time,
        speedup=speedup(candidates, baselines, step_time),
    )


def _difference(candidates: list[float], baselines: list[float]) -> Difference:
    values = tuple(candidate - baseline for candidate, baseline in zip(candidates, baselines, strict=True))
    return Difference(values=values, change=paired_difference(candidates, baselines))


def _curve(
    candidates: list[ComparedRun], baselines: list[ComparedRun], smooth: int | None
) -> tuple[RelativeCurve | None, CriticalPoints | None]:
    """Return relative curve and critical points; None where runs differ in schedule or logged steps."""
    grids = {(run.steps, run.curve.steps) for run in (*candidates, *baselines)}
    if len(grids) != 1 or len(candidates[0].curve.steps) < 2:
        return None, None
    steps = np.array(candidates[0].curve.steps)  # (N,)
    width, distance = steps[-1] / SHARE if smooth is None else smooth, steps[-1] / len(steps)  # in steps
    window = max(1, round(float(width / distance)))  # in logged entries
    losses, reference = (np.array([run.curve.losses for run in group]) for group in (candidates, baselines))  # (S, N)
    relative = smoothed(losses, window) - smoothed(reference, window)
    edges = t_ends(relative)
    curve = RelativeCurve(
        window=window,
        steps=tuple(steps.tolist()),
        mean=tuple(relative.mean(axis=0).tolist()),
        low=None if edges is None else tuple(edges[0].tolist()),
        high=None if edges is None else tuple(edges[1].tolist()),
    )
    # A variant that was never ahead cannot be overtaken: its curve crosses 0 by noise. It is ahead where the band is
    # below 0 over a whole window. Fewer than three pairs have no band.
    high, stretch = curve.high or (), max(SHORTEST, window)
    if not any(max(high[start : start + stretch]) < 0 for start in range(len(high) - stretch + 1)):
        return curve, None
    reached = [critical_point(steps, line) for line in relative]
    known = [point for point in reached if point is not None]
    step = t_mean(known) if len(known) == len(reached) else None
    return curve, CriticalPoints(reached=tuple(reached), step=step)


def smoothed(losses: np.ndarray, window: int) -> np.ndarray:
    """Return the moving average of curves (…, N) over the last `window` values; the first steps average fewer."""
    sums = np.cumsum(losses, axis=-1, dtype=float)
    before = np.zeros_like(sums)
    before[..., window:] = sums[..., :-window]
    counts = np.minimum(np.arange(1, losses.shape[-1] + 1), window)
    return (sums - before) / counts


def critical_point(steps: np.ndarray, relative: np.ndarray) -> float | None:
    """Return the step from which a relative curve (N,) stays above 0: there the baseline overtakes the variant.

    Between two logged steps it is interpolated. None if the curve is never below 0 (nothing to overtake), or does not
    end above 0 (not overtaken yet).
    """
    below = np.flatnonzero(relative <= 0)
    if len(below) == 0 or below[-1] == len(relative) - 1:
        return None
    last = below[-1]
    low, high = relative[last], relative[last + 1]
    return float(steps[last] - low * (steps[last + 1] - steps[last]) / (high - low))


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
    # Two points always lie on a line.
    if len(costs) >= FEWEST:
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
    # In logarithms, since a small exponent would make the power overflow.
    logarithm = math.log(method.scale / baseline.loss(cost)) / method.exponent.value - math.log(cost)
    return math.exp(logarithm) if abs(logarithm) < math.log(FARTHEST) else None


def laws(runs: GroupedRuns, baseline: str) -> tuple[tuple[Law, ...], str | None]:
    """Return the power law of each variant, the baseline's first, or the reason why none was fitted.

    A law goes through configurations that differ only in model, schedule, training arguments and evaluation.
    """
    lines: list[Law] = []
    reason = "it needs two model sizes or two numbers of training tokens, at the same sequence length"
    # labels of the configurations that may differ in a law, by the keys that they share
    groups: dict[str, tuple[str, ...]] = {}
    for configuration in runs.configurations:
        fixed = {key: value for key, value in configuration.values.items() if not key.startswith(SCALED)}
        common = Configuration.from_values(fixed).label
        groups[common] = (*groups.get(common, ()), configuration.label)
    for where, names in groups.items():
        if len(names) < 2:
            continue
        # Only seeds with a run in every configuration: otherwise the points of a law would be of different seeds.
        measured: dict[str, RunsBySeed] = {variant.label: {} for variant in runs.variants}
        by_key = {(run.variant, run.configuration, run.seed): run for run in runs.runs}
        for label, by_seed in measured.items():
            for seed in sorted({run.seed for run in runs.runs}):
                if all((label, name, seed) in by_key for name in names):
                    by_seed[seed] = [by_key[label, name, seed] for name in names]
        if not measured[baseline]:
            reason = f"no seed of {baseline} has a run in every configuration"
            continue

        # The cost that differs, or FLOPs if parameters and tokens both do.
        row = next(iter(measured[baseline].values()))
        parameters, tokens = {run.parameters for run in row}, {run.tokens for run in row}
        cost: Cost = "flops"
        if len(tokens) == 1 and len(parameters) == len(row):
            cost = "parameters"
        elif len(parameters) == 1 and len(tokens) == len(row):
            cost = "tokens"
        costs = _costs(row, cost)
        if not all(higher >= APART * lower for lower, higher in pairwise(sorted(costs))):
            each = ", ".join(f"{value:.4g}" for value in costs)
            reason = (
                f"costs must differ by a factor of {APART} or more, got {each} {COSTS[cost]} for the runs of {baseline}"
            )
            continue
        for label in (baseline, *(label for label in measured if label != baseline)):
            law = _law(measured[label], measured[baseline], cost)
            lines += [] if law is None else [Law(variant=label, where=where, configurations=names, cost=cost, **law)]
    return tuple(lines), None if lines else reason


def _costs(row: Sequence[ComparedRun], cost: Cost) -> list[float]:
    if cost == "flops":
        return [run.flops_per_token * run.tokens for run in row]
    return [float(run.parameters if cost == "parameters" else run.tokens) for run in row]


def _law(variant: RunsBySeed, baseline: RunsBySeed, cost: Cost) -> dict[str, Any] | None:
    """Return the law of a variant; None if no seed has a run in every configuration, or if costs are too close."""
    seeds = [seed for seed in variant if seed in baseline]
    costs = _costs(variant[seeds[0]], cost) if seeds else []
    if not seeds or not all(higher >= APART * lower for lower, higher in pairwise(sorted(costs))):
        return None

    def fit(runs: RunsBySeed, seeds: Sequence[int]) -> tuple[PowerLaw, list[float]]:
        losses = np.mean([[run.final_loss for run in runs[seed]] for seed in seeds], axis=0).tolist()  # (K,)
        return fit_power_law(_costs(runs[seeds[0]], cost), losses), losses

    (law, losses), (reference, _) = fit(variant, seeds), fit(baseline, seeds)
    each = [(fit(variant, [seed])[0], fit(baseline, [seed])[0]) for seed in seeds]
    # A larger model may be worse at a small budget. A law that does not fall says nothing about costs; one once gave
    # "97.5% fewer parameters".
    needed, fewer = None, None
    if reference.exponent.value > 0:
        needed = relative_cost(law, reference, reference.largest)
    # 1 − the geometric mean over seeds, and no interval if a seed never reaches the loss.
    if needed is not None:
        by_seed = [relative_cost(method, plain, plain.largest) for method, plain in each]
        logs = [math.log(cost) for cost in by_seed if cost is not None]
        mean = t_mean(logs if len(logs) == len(by_seed) else [math.log(needed)])
        fewer = mean.mapped(lambda log: 1 - math.exp(log)).model_copy(update={"value": 1 - needed})
    return {
        "costs": costs,
        "losses": losses,
        "scale": law.scale,
        "exponent": law.exponent,
        "exponent_over_seeds": t_mean([method.exponent.value for method, _ in each]),
        "fewer": fewer,
        "extrapolated": needed is not None and not law.smallest <= needed * reference.largest <= law.largest * CLOSE,
    }

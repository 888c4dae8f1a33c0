"""Power laws over settings: of the final loss by size or tokens, and of critical points by length.

Shapes: K settings, S seeds that all of them have.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from crosslayer.stats.means import Interval, t_interval
from crosslayer.verbs.compare.outcomes import Outcome
from crosslayer.verbs.compare.read import Sorted, setting_of
from crosslayer.verbs.compare.record import COSTS, ComparedRun, Cost, Law, LengthTrend, Setting
from crosslayer.verbs.compare.scaling import PowerLaw, fit_power_law, relative_cost

SCALED = ("model.", "schedule.", "budget", "train.", "eval.")  # keys that may differ between the sizes of a law
ALONG = ("data.length", "schedule.", "budget", "train.", "eval.")  # and between the lengths of a trend
APART = 1.5  # the least factor between neighbours in cost: closer ones say nothing of how the loss falls
CLOSE = 1 + 1e-6  # the largest cost, give or take rounding
Side = dict[int, list[ComparedRun]]  # seed → its runs, setting by setting


def laws(runs: Sorted, baseline: str) -> tuple[tuple[Law, ...], str | None]:
    """Return the law of each arm, or why there is none; the baseline's comes first.

    Settings belong together if they differ in model, schedule and arguments alone.
    """
    lines: list[Law] = []
    groups = {where: group for where, group in _groups(runs.settings, SCALED).items() if len(group) > 1}
    if not groups:
        return (), "it needs two sizes of the model, or two numbers of tokens, with sequences of the same length"
    reason = None
    for where, group in groups.items():
        names = [setting.label for setting in group]
        sides = {arm.label: _side(runs, names, arm.label) for arm in runs.arms}
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
        others = [label for label in sides if label != baseline]
        for label in (baseline, *others):
            law = _law(sides[label], sides[baseline], cost)
            lines += [] if law is None else [Law(arm=label, where=where, settings=tuple(names), cost=cost, **law)]
    return tuple(lines), None if lines else reason


def _groups(settings: Sequence[Setting], free: tuple[str, ...]) -> dict[str, list[Setting]]:
    """Return settings that differ at most in keys which begin so, by the label of what they have in common."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        fixed = {key: value for key, value in setting.values.items() if not key.startswith(free)}
        groups.setdefault(setting_of(fixed).label, []).append(setting)
    return groups


def _side(runs: Sorted, settings: Sequence[str], arm: str) -> Side:
    """Return the runs of an arm by seed, of the seeds that all settings have."""
    own = {(run.setting, run.seed): run for run in runs.runs if run.arm == arm}
    seeds = sorted({seed for _, seed in own})
    whole = [seed for seed in seeds if all((setting, seed) in own for setting in settings)]
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


def _fit(rows: Sequence[Sequence[ComparedRun]], cost: Cost) -> PowerLaw:
    """Return the law through the mean losses (K,) of runs (S, K)."""
    return fit_power_law(_costs(rows[0], cost), _losses(rows))


def _losses(rows: Sequence[Sequence[ComparedRun]]) -> list[float]:
    """Return the mean over seeds of final losses (S, K), (K,)."""
    return np.mean([[run.final_loss for run in row] for row in rows], axis=0).tolist()


def _law(side: Side, baseline: Side, cost: Cost) -> dict[str, Any] | None:
    """Return the law of an arm; None where it has no seed in all settings, or costs that are too close."""
    seeds = [seed for seed in side if seed in baseline]
    rows = [side[seed] for seed in seeds]
    if not rows or not _apart(_costs(rows[0], cost)):
        return None
    law, reference = _fit(rows, cost), _fit([baseline[seed] for seed in seeds], cost)
    each = [(_fit([side[seed]], cost), _fit([baseline[seed]], cost)) for seed in seeds]
    falls = law.exponent > 0 and reference.exponent > 0
    needed = relative_cost(law, reference, reference.largest) if falls else None
    by_seed = [relative_cost(own, other, other.largest) for own, other in each]
    return {
        "costs": _costs(rows[0], cost),
        "losses": _losses(rows),
        "scale": law.scale,
        "exponent": law.exponent,
        "exponent_interval": law.exponent_interval,
        "exponent_over_seeds": t_interval([own.exponent for own, _ in each]),
        "fewer": None if needed is None else 1 - needed,
        "fewer_interval": None if needed is None else _fewer_interval(by_seed),
        "extrapolated": needed is not None and not law.smallest <= needed * reference.largest <= law.largest * CLOSE,
    }


def _fewer_interval(needed: Sequence[float | None]) -> Interval | None:
    """Return the interval of 1 − the geometric mean of needed costs (S,); None where a seed's law needs none at all."""
    known = [math.log(value) for value in needed if value is not None]
    interval = t_interval(known) if len(known) == len(needed) else None
    return None if interval is None else (1 - math.exp(interval[1]), 1 - math.exp(interval[0]))


def trends(runs: Sorted, results: Sequence[Outcome]) -> tuple[LengthTrend, ...]:
    """Return how many tokens it takes to overtake each arm by the length of a sequence, where it is in two lengths.

    Settings belong together if they differ in length, schedule and arguments alone. The trend is continued to twice the
    longest length.
    """
    lengths = {run.setting: run.length for run in runs.runs}
    batches = {run.setting: run.tokens / run.steps for run in runs.runs}  # tokens of a step
    lines = []
    for where, group in _groups(runs.settings, ALONG).items():
        for arm in runs.arms:
            names = {setting.label for setting in group}
            reached = {
                lengths[result.setting]: result.critical.mean * batches[result.setting]
                for result in results
                if result.arm == arm.label and result.setting in names
                if result.overtaken and result.critical is not None and result.critical.mean is not None
            }
            if len(reached) > 1:
                lines.append(_trend(arm.label, where, dict(sorted(reached.items()))))
    return tuple(lines)


def _trend(arm: str, where: str, reached: dict[int, float]) -> LengthTrend:
    law = fit_power_law([*map(float, reached)], [*reached.values()])
    interval = law.exponent_interval
    longest = max(reached)
    return LengthTrend(
        arm=arm,
        where=where,
        lengths=tuple(reached),
        tokens=tuple(reached.values()),
        exponent=-law.exponent,
        interval=None if interval is None else (-interval[1], -interval[0]),
        next_length=2 * longest,
        next_tokens=law.loss(2 * longest),
    )

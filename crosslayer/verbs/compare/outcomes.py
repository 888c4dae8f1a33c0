"""What follows from runs: each arm beside the baseline, setting by setting.

Shapes: S pairs (seeds that both have), N logged steps.
"""

from collections.abc import Sequence

import numpy as np

from crosslayer.stats.means import extended, holm, paired_difference, seeds_needed, t_interval
from crosslayer.verbs.compare.curves import band, critical_point, entries_of, expected_critical_point, relative_curve
from crosslayer.verbs.compare.read import Sorted
from crosslayer.verbs.compare.record import RELEVANT, ComparedRun, CriticalPoints, Outcome, RelativeCurve

Pair = tuple[ComparedRun, ComparedRun]  # candidate, baseline


def outcomes(runs: Sorted, baseline: str, smooth: int | None) -> tuple[Outcome, ...]:
    """Return every arm beside the baseline in each setting where either has runs.

    Args:
        runs: all of them.
        baseline: label of an arm.
        smooth: over how many steps training curves are smoothed; None for a twentieth.

    """
    grouped: dict[tuple[str, str], dict[int, ComparedRun]] = {}
    for run in runs.runs:
        grouped.setdefault((run.setting, run.arm), {})[run.seed] = run
    results = [
        _outcome(
            setting.label, arm.label, grouped[setting.label, arm.label], grouped.get((setting.label, baseline), {})
        )
        for setting in runs.settings
        for arm in runs.arms
        if arm.label != baseline and (setting.label, arm.label) in grouped
    ]
    return _adjusted([_with_curves(result, grouped, baseline, smooth) for result in results], len(runs.extends))


def _outcome(setting: str, arm: str, own: dict[int, ComparedRun], others: dict[int, ComparedRun]) -> Outcome:
    seeds = sorted(own.keys() & others.keys())
    sides = [own[seed] for seed in seeds], [others[seed] for seed in seeds]
    final = paired_difference(*([run.final_loss for run in side] for side in sides)) if seeds else None
    domains = {
        name: paired_difference(*([run.losses[name] for run in side] for side in sides))
        for name in (sides[0][0].losses if seeds else ())
    }
    return Outcome(
        setting=setting,
        arm=arm,
        seeds=tuple(seeds),
        missing=tuple(sorted(own.keys() ^ others.keys())),
        loss=float(np.mean([run.final_loss for run in own.values()])),
        final=final,
        adjusted=None,
        domains=domains,
        seeds_needed=None if final is None else seeds_needed(final.values, RELEVANT),
        curve=None,
        critical=None,
    )


def _with_curves(
    result: Outcome, grouped: dict[tuple[str, str], dict[int, ComparedRun]], baseline: str, smooth: int | None
) -> Outcome:
    """Add what follows from the training curves, where both sides have logged at the same steps of one schedule."""
    own, others = grouped[result.setting, result.arm], grouped.get((result.setting, baseline), {})
    pairs = [(own[seed], others[seed]) for seed in result.seeds]
    grids = {(run.steps, run.curve.steps) for pair in pairs for run in pair}
    if len(grids) != 1 or len(pairs[0][0].curve.steps) < 2:
        return result
    steps = np.array(pairs[0][0].curve.steps)  # (N,)
    window = entries_of(steps, smooth)
    relative = _relative(pairs, window)
    edges = band(relative)
    curve = RelativeCurve(
        window=window,
        steps=tuple(steps.tolist()),
        mean=tuple(relative.mean(axis=0).tolist()),
        low=None if edges is None else tuple(edges[0].tolist()),
        high=None if edges is None else tuple(edges[1].tolist()),
    )
    return result.model_copy(update={"curve": curve, "critical": _critical(steps, relative) if curve.ahead else None})


def _relative(pairs: Sequence[Pair], window: int) -> np.ndarray:
    """Return the smoothed differences of the training curves of pairs, (S, N)."""
    candidate, baseline = (np.array([pair[side].curve.losses for pair in pairs]) for side in (0, 1))
    return relative_curve(candidate, baseline, window)


def _critical(steps: np.ndarray, relative: np.ndarray) -> CriticalPoints:
    """Return where the baseline overtakes, by the relative curve of each pair (S, N)."""
    reached = [critical_point(steps, curve) for curve in relative]
    expected = [expected_critical_point(steps, curve) for curve in relative]
    known = [point for point in reached if point is not None]
    complete = len(known) == len(reached)
    return CriticalPoints(
        reached=tuple(reached),
        expected=tuple(expected),
        mean=float(np.mean(known)) if complete else None,
        interval=t_interval(known) if complete else None,
    )


def _adjusted(results: Sequence[Outcome], pages: int) -> tuple[Outcome, ...]:
    """Add p-values that hold for all comparisons of the page together, and for the pages before it."""
    places = [place for place, result in enumerate(results) if result.final is not None and result.final.p is not None]
    values = [result.final.p for result in results if result.final is not None and result.final.p is not None]
    adjusted = dict(zip(places, [extended(value, pages) for value in holm(values)], strict=True))
    return tuple(result.model_copy(update={"adjusted": adjusted.get(place)}) for place, result in enumerate(results))

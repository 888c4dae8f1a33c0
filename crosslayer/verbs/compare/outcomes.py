"""Each variant compared with the baseline in every configuration: final loss, training curve, critical point.

Source: arXiv 2410.17897, section 4.1.2 (relative training loss) and Fig. 14 (critical point).
Shapes: S pairs (seeds with a run of both), N logged steps.
"""

import numpy as np

from crosslayer.stats.differences import holm, paired_difference, seeds_needed, t_ends, t_mean
from crosslayer.verbs.compare.read import Sorted
from crosslayer.verbs.compare.result import RELEVANT, ComparedRun, CriticalPoints, Difference, Outcome, RelativeCurve

SHARE = 20  # by default a curve is smoothed over 1/20 of its length


def outcomes(runs: Sorted, baseline: str, smooth: int | None) -> tuple[Outcome, ...]:
    """Return each variant compared with the baseline in each configuration; curves are smoothed over `smooth` steps."""
    grouped: dict[tuple[str, str], dict[int, ComparedRun]] = {}
    for run in runs.runs:
        grouped.setdefault((run.configuration, run.variant), {})[run.seed] = run
    results = [
        _outcome(own, grouped.get((configuration.label, baseline), {}), smooth)
        for configuration in runs.configurations
        for variant in runs.variants
        if variant.label != baseline and (own := grouped.get((configuration.label, variant.label)))
    ]
    p_values = {row: p for row, each in enumerate(results) if each.final and (p := each.final.change.p) is not None}
    for row, p in zip(p_values, holm([*p_values.values()]), strict=True):
        results[row] = results[row].model_copy(update={"adjusted": p})
    return tuple(results)


def _outcome(own: dict[int, ComparedRun], others: dict[int, ComparedRun], smooth: int | None) -> Outcome:
    first = next(iter(own.values()))
    seeds = sorted(own.keys() & others.keys())
    candidates, baselines = [own[seed] for seed in seeds], [others[seed] for seed in seeds]
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
        missing=tuple(sorted(own.keys() ^ others.keys())),
        loss=float(np.mean([run.final_loss for run in own.values()])),
        final=final,
        adjusted=None,
        domains=domains,
        seeds_needed=None if final is None else seeds_needed(final.values, RELEVANT),
        curve=curve,
        critical=critical,
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
    window = entries_of(steps, smooth)
    own, other = (np.array([run.curve.losses for run in group]) for group in (candidates, baselines))  # (S, N)
    relative = smoothed(own, window) - smoothed(other, window)
    edges = band(relative)
    curve = RelativeCurve(
        window=window,
        steps=tuple(steps.tolist()),
        mean=tuple(relative.mean(axis=0).tolist()),
        low=None if edges is None else tuple(edges[0].tolist()),
        high=None if edges is None else tuple(edges[1].tolist()),
    )
    if not curve.ahead:
        return curve, None
    reached = [critical_point(steps, line) for line in relative]
    known = [point for point in reached if point is not None]
    step = t_mean(known) if len(known) == len(reached) else None
    return curve, CriticalPoints(reached=tuple(reached), step=step)


def entries_of(steps: np.ndarray, smooth: int | None) -> int:
    """Return the smoothing window in logged entries, at steps (N,), for `smooth` steps; None: 1/20 of the curve."""
    window = steps[-1] / SHARE if smooth is None else smooth
    distance = steps[-1] / len(steps)
    return max(1, round(float(window / distance)))


def smoothed(losses: np.ndarray, window: int) -> np.ndarray:
    """Return the moving average of curves (…, N) over the last `window` values; the first steps average fewer."""
    if window < 1:
        raise ValueError(f"window must be at least 1 step, got {window}")
    sums = np.cumsum(losses, axis=-1, dtype=float)
    before = np.zeros_like(sums)
    before[..., window:] = sums[..., :-window]
    counts = np.minimum(np.arange(1, losses.shape[-1] + 1), window)
    return (sums - before) / counts


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the lower and the upper edge (N,) of the mean of curves (S, N).

    From three curves on it is the 95% confidence interval of the mean by Student's t. For two it is the range that both
    span, which is not a confidence interval; for one None.
    """
    return (curves.min(axis=0), curves.max(axis=0)) if len(curves) == 2 else t_ends(curves)


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

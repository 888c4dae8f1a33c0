"""Training curves beside a baseline's: smoothed, subtracted, and where one overtakes the other.

Source: arXiv 2410.17897, section 4.1.2 (relative training loss) and Fig. 14 (critical point).
Shapes: S seeds, N logged steps.
"""

import numpy as np
from scipy import stats

from crosslayer.stats.means import FEWEST, t_quantile

SHARE = 20  # a curve is smoothed over its 20th part, unless it is said otherwise
FARTHEST = 10  # times the length of a run, beyond which nothing is expected
LAST = 1000  # points of a curve that are continued: those of the paper; of a short curve its second half


def entries_of(steps: np.ndarray, smooth: int | None) -> int:
    """Return over how many logged entries (N,) a curve is smoothed, at least 1.

    Args:
        steps: at which losses were logged.
        smooth: so many steps; None for the 20th part of the last.

    """
    wanted = steps[-1] / SHARE if smooth is None else smooth
    distance = steps[-1] / len(steps)
    return max(1, round(float(wanted / distance)))


def smoothed(losses: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the last `window` values up to each step of curves (…, N); the first steps have fewer."""
    if window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 step")
    sums = np.cumsum(losses, axis=-1, dtype=float)
    before = np.zeros_like(sums)
    before[..., window:] = sums[..., :-window]
    counts = np.minimum(np.arange(1, losses.shape[-1] + 1), window)
    return (sums - before) / counts


def relative_curve(candidate: np.ndarray, baseline: np.ndarray, window: int) -> np.ndarray:
    """Return smoothed candidate − smoothed baseline, seed by seed, of curves (S, N): (S, N)."""
    return smoothed(candidate, window) - smoothed(baseline, window)


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the lower and the upper edge (N,) of the mean of curves (S, N).

    From three curves on it is the 95 % interval of the mean by Student's t, of two it is both; None of one.
    """
    count = len(curves)
    if count < 2:
        return None
    if count < FEWEST:
        return curves.min(axis=0), curves.max(axis=0)
    half = t_quantile(count - 1) * stats.sem(curves, axis=0)
    return curves.mean(axis=0) - half, curves.mean(axis=0) + half


def critical_point(steps: np.ndarray, relative: np.ndarray) -> float | None:
    """Return the step from which on a relative curve (N,) stays above 0: there the method is overtaken.

    Between two logged steps it is where the line through both crosses. None where the curve never is below 0 before
    (nothing to overtake), or does not end above 0 (not overtaken yet).
    """
    below = np.flatnonzero(relative <= 0)
    if len(below) == 0 or below[-1] == len(relative) - 1:
        return None
    last = below[-1]
    low, high = relative[last], relative[last + 1]
    return float(steps[last] - low * (steps[last + 1] - steps[last]) / (high - low))


def expected_critical_point(steps: np.ndarray, relative: np.ndarray) -> float | None:
    """Return where the straight line through the last points of a relative curve (N,) will cross 0.

    They are 1,000, or the second half of a shorter curve. None where the curve does not rise, or is above 0 already;
    then `critical_point` has the answer.
    """
    if relative[-1] > 0 or len(steps) < 2:
        return None
    count = max(2, min(LAST, len(steps) // 2))
    slope, intercept = np.polyfit(steps[-count:], relative[-count:], 1)
    if slope <= 0:
        return None
    crossing = float(-intercept / slope)
    return crossing if steps[-1] < crossing <= FARTHEST * steps[-1] else None

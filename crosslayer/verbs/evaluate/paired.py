"""Differences between two models on the same items, and what may be said of them.

    D = Σ (x_i − y_i) / Σ w_i;   r_i = (x_i − y_i − D w_i) / mean(w);   D ± t(0.975, n − 1) · std(r) / √n

x and y are the items of the candidate and of the baseline; w is 1 but for perplexities over words or bytes. For equal
weights this is the paired t interval of a mean. It is taken rather than a bootstrap since it is the same at every call,
needs no draws, and agrees with one for the hundreds of items that tasks have.

Of items that are right or wrong `crosslayer.stats.shares` has it.

Shapes: n items, T tasks. Source of the number of items: Connor (1987).
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field
from scipy import stats

from crosslayer.output.record import Frozen
from crosslayer.stats import NORMAL, Interval
from crosslayer.stats.means import t_quantile
from crosslayer.stats.shares import Verdict, mcnemar, share_difference, share_error, verdict_of

POWER = 0.8
POINT = 0.01  # the difference for which items are counted: a point of a share, 1 % of a perplexity
FEWEST = 3  # items that give an interval of a mean


class Discordant(Frozen):
    """Of items that are right or wrong: how many only the candidate has right, and how many only the baseline."""

    candidate: int = Field(ge=0)
    baseline: int = Field(ge=0)


class Paired(Frozen):
    """Candidate − baseline, or candidate / baseline for perplexities, with its 95 % interval."""

    form: Literal["difference", "ratio"]
    estimate: float
    interval: Interval | None = Field(description="None below three items, unless they are right or wrong")
    p: float | None = Field(ge=0, le=1, description="two-sided: McNemar's exact test, Student's t, or of groups normal")
    discordant: Discordant | None = None
    verdict: Verdict
    items_for_a_point: int | None = Field(description="for 1 point, or 1 % of a perplexity, with a power of 80 %")


def compare_shares(candidate: np.ndarray, baseline: np.ndarray, higher_is_better: bool = True) -> Paired:
    """Return the paired difference of shares of items (n,) that are 0 or 1."""
    only = int(((candidate == 1) & (baseline == 0)).sum()), int(((candidate == 0) & (baseline == 1)).sum())
    count, p = len(candidate), mcnemar(*only)
    interval = share_difference(*only, count)
    return Paired(
        form="difference",
        estimate=(only[0] - only[1]) / count,
        interval=interval,
        p=p,
        discordant=Discordant(candidate=only[0], baseline=only[1]),
        verdict=verdict_of(interval, higher_is_better, p),
        items_for_a_point=items_for_shares(sum(only) / len(candidate)),
    )


def compare_means(
    candidate: np.ndarray, baseline: np.ndarray, weights: np.ndarray, higher_is_better: bool = True
) -> Paired:
    """Return the paired difference of weighted means of items (n,)."""
    estimate, error = _weighted(candidate - baseline, weights)
    interval = _interval(estimate, error, len(candidate))
    return Paired(
        form="difference",
        estimate=estimate,
        interval=interval,
        p=_p_value(estimate, error, len(candidate)),
        verdict=verdict_of(interval, higher_is_better),
        items_for_a_point=None,
    )


def compare_perplexities(candidate: np.ndarray, baseline: np.ndarray, weights: np.ndarray) -> Paired:
    """Return the ratio of perplexities exp(−Σ x / Σ w) of items (n,), whose log likelihoods are given."""
    estimate, error = _weighted(baseline - candidate, weights)  # of the log perplexity
    interval = _interval(estimate, error, len(candidate))
    needed = None if error is None else _items(error * math.sqrt(len(candidate)), math.log1p(POINT))
    return Paired(
        form="ratio",
        estimate=math.exp(estimate),
        interval=None if interval is None else (math.exp(interval[0]), math.exp(interval[1])),
        p=_p_value(estimate, error, len(candidate)),
        verdict=verdict_of(interval, higher_is_better=False),
        items_for_a_point=needed,
    )


def compare_groups(differences: Sequence[np.ndarray], weights: np.ndarray) -> Paired:
    """Return the difference of the mean over T tasks, with weights (T,), out of those of their items (n,), −1 to 1.

    Tasks are independent, so their variances, each as above, add up.
    """
    shares = weights / weights.sum()
    errors = np.array([share_error(int((d > 0).sum()), int((d < 0).sum()), len(d)) for d in differences])
    estimate = float(shares @ np.array([values.mean() for values in differences]))
    error = float(np.sqrt(((shares * errors) ** 2).sum()))
    interval = (max(-1.0, estimate - NORMAL * error), min(1.0, estimate + NORMAL * error))
    return Paired(
        form="difference",
        estimate=estimate,
        interval=interval,
        p=float(2 * stats.norm.sf(abs(estimate) / error)),
        verdict=verdict_of(interval, higher_is_better=True),
        items_for_a_point=None,
    )


def items_for_shares(discordance: float) -> int:
    """Return with how many items a difference of 1 point is seen in 80 % of cases, by the share that differs.

    Where fewer than 1 % differ, no difference of a point is possible; then so many are taken as it needs.
    """
    share = max(discordance, POINT)
    high = stats.norm.ppf(POWER)
    return math.ceil(((NORMAL * math.sqrt(share) + high * math.sqrt(share - POINT**2)) / POINT) ** 2)


def _items(spread: float, difference: float) -> int | None:
    """Return with how many items of a standard deviation a difference is seen in 80 % of cases."""
    if not spread:
        return None
    quantiles = NORMAL + stats.norm.ppf(POWER)
    return max(FEWEST, math.ceil((quantiles * spread / difference) ** 2))


def _weighted(differences: np.ndarray, weights: np.ndarray) -> tuple[float, float | None]:
    """Return Σ d / Σ w of n items and its standard error; None below `FEWEST`."""
    count, estimate = len(differences), float(differences.sum() / weights.sum())
    if count < FEWEST:
        return estimate, None
    residuals = (differences - estimate * weights) / weights.mean()
    return estimate, float(residuals.std(ddof=1) / math.sqrt(count))


def _interval(estimate: float, error: float | None, count: int) -> Interval | None:
    if error is None:
        return None
    half = error * t_quantile(count - 1)
    return estimate - half, estimate + half


def _p_value(estimate: float, error: float | None, count: int) -> float | None:
    if error is None:
        return None
    if not error:
        return 0.0 if estimate else 1.0
    return float(2 * stats.t.sf(abs(estimate) / error, count - 1))

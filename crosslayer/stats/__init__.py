"""Intervals and tests, each once, with its source: of shares, means, ratios of times, and windows of text."""

import functools

from scipy import stats

LEVEL = 0.95  # how often an interval holds the truth
NORMAL = float(stats.norm.ppf((1 + LEVEL) / 2))  # standard errors to either side, by the normal law

Interval = tuple[float, float]  # low, high


@functools.cache
def t_quantile(degrees: int) -> float:
    """Return by how many standard errors a 95% interval reaches to either side, by Student's t."""
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees))

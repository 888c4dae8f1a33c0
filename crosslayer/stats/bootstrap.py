"""Intervals for means over windows of text: a bootstrap that draws windows within their documents.

Intervals are percentiles of windows drawn again within each document, n − 1 of its n (Rao and Wu 1988), so that the
spread is not understated. Documents of fewer than 8 windows are drawn together (with the first larger document, where
they have fewer than 8 in all); where that leaves a single stratum, windows are taken as independent. Draws are spread
by Student's t over the normal quantile, since a domain may have 16 windows only. All is conditional on this text.
"""

import numpy as np
from scipy import stats

from crosslayer.output.record import Frozen
from crosslayer.stats import LEVEL, NORMAL, Interval

DRAWS = 4000
STRATUM = 8  # windows, below which a document is no stratum of its own


class Estimate(Frozen):
    """A figure with its paired 95 % interval over windows."""

    value: float
    ci95: Interval


class Bootstrap:
    """Draws of N windows, whose documents are `documents`; equal for equal documents and seed, so that all is paired.

    `strata` are the windows (their numbers) within which draws are made.
    """

    def __init__(self, documents: tuple[int, ...], seed: int = 0):
        self.strata = _strata(documents)
        windows = len(documents)
        generator = np.random.default_rng(seed)
        weights = np.zeros((DRAWS, windows))  # of each window in the mean of each draw
        for rows in self.strata:
            count = len(rows)
            drawn = generator.multinomial(count - 1, np.full(count, 1 / count), size=DRAWS)  # (DRAWS, count)
            weights[:, rows] = drawn * (count / (count - 1) / windows)
        freedom = windows - len(self.strata)
        spread = stats.t.ppf((1 + LEVEL) / 2, freedom) / NORMAL
        self.weights = (1 + spread * (weights * windows - 1)) / windows  # (DRAWS, N)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of values (N,) in each draw, (DRAWS,)."""
        return self.weights @ values

    def interval(self, values: np.ndarray) -> Interval:
        """Return the 95 % interval of the mean of values (N,)."""
        return percentiles(self.means(values))

    def mean(self, values: np.ndarray) -> Estimate:
        """Return the mean of values (N,)."""
        return Estimate(value=float(values.mean()), ci95=self.interval(values))

    def ratio(self, differences: np.ndarray) -> Estimate:
        """Return the ratio of perplexities, whose logarithms are differences of losses (N,)."""
        return Estimate(value=float(np.exp(differences.mean())), ci95=percentiles(np.exp(self.means(differences))))

    def closed(self, gap: np.ndarray, left: np.ndarray) -> Estimate | None:
        """Return the share of the mean of a gap (N,) that is closed, where so much is left (N,).

        None where the gap's own interval reaches 0.
        """
        if self.interval(gap)[0] <= 0:
            return None
        draws = self.means(gap)
        shares = 1 - self.means(left) / np.where(draws > 0, draws, np.nan)
        return Estimate(value=float(1 - left.mean() / gap.mean()), ci95=percentiles(shares[np.isfinite(shares)]))


def percentiles(draws: np.ndarray) -> Interval:
    """Return the middle 95 % of draws."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _strata(documents: tuple[int, ...]) -> list[np.ndarray]:
    """Return the windows of each stratum: large documents, and all small ones together."""
    names = np.array(documents)
    by_document = [np.flatnonzero(names == name) for name in sorted(set(documents))]
    large = [rows for rows in by_document if len(rows) >= STRATUM]
    small = [rows for rows in by_document if len(rows) < STRATUM]
    if not small:
        return large
    together = np.concatenate(small)
    if large and len(together) < STRATUM:
        return [np.concatenate([large[0], together]), *large[1:]]
    return [*large, together]

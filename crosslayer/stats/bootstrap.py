"""Intervals for means over windows of text: bootstraps that draw windows within documents, or whole documents.

`Bootstrap` has percentiles of windows drawn again within each document, n − 1 of its n (Rao and Wu 1988), so that the
spread is not understated. Documents of fewer than 8 windows are drawn together (with the first larger document, where
they have fewer than 8 in all); where that leaves a single stratum, windows are taken as independent. Draws are spread
by Student's t over the normal quantile, since a domain may have 16 windows only. All is conditional on this text.

`measure` and `by_position` summarize the values of N sequences for a record.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from crosslayer.output.record import Measure, PositionBins
from crosslayer.stats import LEVEL, NORMAL, Interval, t_quantile
from crosslayer.stats.differences import FEWEST, standard_error
from crosslayer.stats.estimate import Estimate

DRAWS = 4000
STRATUM = 8  # windows, below which a document is no stratum of its own
POSITION_BINS = 128
Ends = Callable[[np.ndarray], np.ndarray]  # from values (N, …) to the ends (…, 2) of the interval of their mean


class Bootstrap:
    """Draws of N windows, whose documents are `documents`; equal for equal documents and seed, so that all is paired.

    `strata` are the windows (their numbers) within which draws are made.
    """

    def __init__(self, documents: tuple[int, ...], seed: int = 0):
        self.strata, self.weights = _drawn(documents, seed)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of values (N,) in each draw, (DRAWS,)."""
        return self.weights @ values

    def mean(self, values: np.ndarray) -> Estimate:
        """Return the mean of values (N,)."""
        return self._estimate(values.mean(), self.means(values))

    def ratio(self, differences: np.ndarray) -> Estimate:
        """Return the ratio of perplexities, whose logarithms are differences of losses (N,)."""
        return self._estimate(np.exp(differences.mean()), np.exp(self.means(differences)), none=1)

    def closed(self, gap: np.ndarray, left: np.ndarray) -> Estimate | None:
        """Return the share of the mean of a gap (N,) that is closed when `left` (N,) of it remains.

        None where the gap's own interval reaches 0.
        """
        draws = self.means(gap)
        if percentiles(draws)[0] <= 0:
            return None
        shares = 1 - self.means(left) / np.where(draws > 0, draws, np.nan)
        return self._estimate(1 - left.mean() / gap.mean(), shares[np.isfinite(shares)])

    def _estimate(self, value: float, draws: np.ndarray, none: float = 0) -> Estimate:
        windows = self.weights.shape[1]
        low, high = percentiles(draws) if windows > 1 else (None, None)
        return Estimate(value=float(value), low=low, high=high, n=windows, over="windows", how="bootstrap", none=none)


def over_documents(documents: Sequence[int]) -> Ends | None:
    """Return the function from values (N, …) of windows to the 95% interval (…, 2) of their mean, over documents.

    D − 1 of the D documents are drawn with all of their windows, which are not independent, and draws are spread by
    Student's t, as above. A number below 0 is a document by itself. None where there are fewer than three.
    """
    each = [name if name >= 0 else -1 - window for window, name in enumerate(documents)]
    names, of_window = np.unique(each, return_inverse=True)
    if len(names) < FEWEST:
        return None
    drawn = np.random.default_rng(0).multinomial(len(names) - 1, [1 / len(names)] * len(names), size=DRAWS)
    weights = drawn[:, of_window] / drawn[:, of_window].sum(axis=1, keepdims=True) - 1 / len(documents)  # (DRAWS, N)
    weights = 1 / len(documents) + t_quantile(len(names) - 1) / NORMAL * weights

    def ends(values: np.ndarray) -> np.ndarray:
        columns = values.reshape(len(values), -1).T
        return np.array([percentiles(weights @ column) for column in columns]).reshape(*values.shape[1:], 2)

    return ends


def percentiles(draws: np.ndarray) -> Interval:
    """Return the middle 95% of draws."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@functools.lru_cache(maxsize=4)  # most results are of the same windows
def _drawn(documents: tuple[int, ...], seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the strata of N windows, and the weight of each window in each draw, (DRAWS, N)."""
    strata, windows = _strata(documents), len(documents)
    if windows == 1:  # it has a mean, and no interval
        return strata, np.ones((1, 1))
    generator = np.random.default_rng(seed)
    weights = np.zeros((DRAWS, windows))  # of each window in the mean of each draw
    for rows in strata:
        count = len(rows)
        drawn = generator.multinomial(count - 1, np.full(count, 1 / count), size=DRAWS)  # (DRAWS, count)
        weights[:, rows] = drawn * (count / (count - 1) / windows)
    spread = t_quantile(windows - len(strata)) / NORMAL
    weights = (1 + spread * (weights * windows - 1)) / windows
    weights.setflags(write=False)  # all that were drawn alike have the same
    return strata, weights


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


def measure(sample: np.ndarray, over_documents: Ends | None = None) -> Measure:
    """Return a measure by layer for a record, from its values (N, L), (N, L, L) or (N, L, k) over N sequences.

    Its interval is what `over_documents` returns, otherwise Student's t over sequences, which a single one lacks.
    """
    count, mean = len(sample), sample.mean(axis=0)
    if over_documents is not None:
        return Measure(mean=plain(mean), ci95=plain(over_documents(sample)), n=count, over="documents")
    if count < 2:
        return Measure(mean=plain(mean), ci95=None, n=count)
    half = t_quantile(count - 1) * standard_error(sample)
    return Measure(mean=plain(mean), ci95=plain(np.stack([mean - half, mean + half], axis=-1)), n=count)


def by_position(sample: np.ndarray, single: Iterable[int] = ()) -> PositionBins:
    """Return a quantity by position, (N, L, T), averaged over sequences and bins that widen with the position.

    Positions in `single` have bins of their own.
    """
    mean = sample.mean(axis=0)  # (L, T)
    size = mean.shape[-1]
    edges = np.unique(np.geomspace(1, size + 1, POSITION_BINS + 1).round().astype(int) - 1)[:-1]
    edges = np.unique([*edges, *(edge for p in single for edge in (p, p + 1) if edge < size)])
    widths = np.diff(np.append(edges, size))
    binned = np.add.reduceat(mean, edges, axis=-1) / widths  # (L, bins)
    return PositionBins(edges=edges.tolist(), length=size, mean=plain(binned))


def plain(values: np.ndarray) -> Any:
    """Turn an array into nested lists with None for what is undefined (NaN, or a ratio to zero)."""
    entries = np.asarray(values).astype(object)
    entries[~np.isfinite(values)] = None
    return entries.tolist()

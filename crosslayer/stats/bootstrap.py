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
# Windows, below which a document is no stratum of its own: draws within a document of one window are all alike, and
# give an interval of no width. Pooled like this, intervals cover 95% from 1 to 64 windows a document.
STRATUM = 8
POSITION_BINS = 128
Ends = Callable[[np.ndarray], np.ndarray]  # from values (N, …) to the ends (…, 2) of the interval of their mean


class Bootstrap:
    """Draws of N windows, whose documents are `documents`; equal for equal documents and seed, so that all is paired.

    `strata` are the windows (their numbers) within which draws are made.
    """

    def __init__(self, documents: tuple[int, ...], seed: int = 0):
        self.strata, self.weights = _drawn(documents, seed)

    def mean(self, values: np.ndarray) -> Estimate:
        """Return the mean of values (N,)."""
        return self._estimate(values.mean(), self.weights @ values)

    def ratio(self, differences: np.ndarray) -> Estimate:
        """Return the ratio of perplexities, whose logarithms are differences of losses (N,)."""
        return self._estimate(np.exp(differences.mean()), np.exp(self.weights @ differences), none=1)

    def closed(self, gap: np.ndarray, left: np.ndarray) -> Estimate | None:
        """Return the share of the mean of a gap (N,) that is closed when `left` (N,) of it remains.

        None where the gap's own interval reaches 0.
        """
        # a share of a gap that may be 0 has no interval
        draws = self.weights @ gap  # (DRAWS,)
        if percentiles(draws)[0] <= 0:
            return None
        # fewer than 2.5% of the draws have no gap: they are left out
        shares = 1 - self.weights @ left / np.where(draws > 0, draws, np.nan)
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
    # draws of D − 1: draws of D have a spread that is too small by √((D − 1)/D)
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(len(names) - 1, [1 / len(names)] * len(names), size=DRAWS)[:, of_window]
    weights = drawn / drawn.sum(axis=1, keepdims=True)  # (DRAWS, N)
    # percentiles are as narrow as the normal law, also of three documents
    weights = 1 / len(documents) + t_quantile(len(names) - 1) / NORMAL * (weights - 1 / len(documents))

    def ends(values: np.ndarray) -> np.ndarray:
        columns = values.reshape(len(values), -1).T
        return np.array([percentiles(weights @ column) for column in columns]).reshape(*values.shape[1:], 2)

    return ends


def percentiles(draws: np.ndarray) -> Interval:
    """Return the middle 95% of draws."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


# most results are of the same windows
@functools.lru_cache(maxsize=4)
def _drawn(documents: tuple[int, ...], seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the strata of N windows, and the weight of each window in each draw, (DRAWS, N)."""
    # large documents are a stratum each, all small ones are one together
    windows = len(documents)
    names = np.array(documents)
    by_document = [np.flatnonzero(names == name) for name in sorted(set(documents))]
    strata = [members for members in by_document if len(members) >= STRATUM]
    small = [members for members in by_document if len(members) < STRATUM]
    if small:
        together = np.concatenate(small)
        if strata and len(together) < STRATUM:
            strata[0] = np.concatenate([strata[0], together])
        else:
            strata.append(together)

    # a single window has a mean, and no interval
    if windows == 1:
        return strata, np.ones((1, 1))
    generator = np.random.default_rng(seed)
    weights = np.zeros((DRAWS, windows))
    for members in strata:
        # n − 1 of the n windows: draws of n have a spread that is too small by √((n − 1)/n)
        count = len(members)
        drawn = generator.multinomial(count - 1, np.full(count, 1 / count), size=DRAWS)  # (DRAWS, count)
        weights[:, members] = drawn * (count / (count - 1) / windows)

    # percentiles are as narrow as the normal law, also where a domain has 16 windows only
    spread = t_quantile(windows - len(strata)) / NORMAL
    weights = (1 + spread * (weights * windows - 1)) / windows
    # all that were drawn alike have the same array
    weights.setflags(write=False)
    return strata, weights


def measure(sample: np.ndarray, over_documents: Ends | None = None) -> Measure:
    """Return a measure by layer for a record, from its values (N, L), (N, L, L) or (N, L, k) over N sequences.

    Its interval is what `over_documents` returns, otherwise Student's t over sequences, which a single one lacks.
    """
    count = len(sample)
    mean = sample.mean(axis=0)
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
    # at the low end several edges fall on one position, which then has a bin of its own
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

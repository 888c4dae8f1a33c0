"""Means over sequences with their intervals, and importance by position, for records."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy import stats

from crosslayer.output.record import Measure, PositionBins

POSITION_BINS = 128
Ends = Callable[[np.ndarray], np.ndarray]  # from values (N, …) to the ends (…, 2) of the interval of their mean


def measure(sample: np.ndarray, over_documents: Ends | None = None) -> Measure:
    """Return a measure by layer for a record, from its values (N, L), (N, L, L) or (N, L, k) over N sequences."""
    return Measure.model_validate(summarize(sample, over_documents))


def summarize(sample: np.ndarray, over_documents: Ends | None = None) -> dict[str, Any]:
    """Return the mean over sequences and its 95% interval, (N, …) → fields of a `Measure`.

    `ci95` has a pair [low, high] for each entry of the mean: what `over_documents` returns, otherwise Student's t over
    sequences, which is None for a single one.
    """
    count, mean = len(sample), sample.mean(axis=0)
    if over_documents is not None:
        return {"mean": plain(mean), "ci95": plain(over_documents(sample)), "n": count, "over": "documents"}
    if count < 2:
        return {"mean": plain(mean), "ci95": None, "n": count}
    half = stats.t.ppf(0.975, count - 1) * stats.sem(sample, axis=0)
    return {"mean": plain(mean), "ci95": plain(np.stack([mean - half, mean + half], axis=-1)), "n": count}


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

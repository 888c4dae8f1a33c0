"""Rows of a report: what is counted, and what cannot be compared."""

from crosslayer.cache.kv_cache import Bytes
from crosslayer.judge.clock import Run
from crosslayer.judge.rows import cache_rows, count_ratio
from crosslayer.machine import Peak


def test_counts_have_a_verdict_without_a_spread_and_none_with_nothing():
    smaller = count_ratio(3, 4)
    assert (smaller.value, smaller.interval, smaller.verdict) == (0.75, (0.75, 0.75), "lower")
    assert count_ratio(4, 4).verdict == "no difference seen" and count_ratio(5, 4).verdict == "higher"
    assert count_ratio(0, 4) is count_ratio(4, 0) is count_ratio(None, 4) is None


def test_a_cache_in_which_no_tensor_is_found_has_no_ratio():
    """Whose tensors are where nobody can see them: its row stays, and nothing is claimed."""
    hidden, whole = (Run({}, Bytes(size, size), None, Peak()) for size in (0, 64))
    (row,) = cache_rows(hidden, whole, candidate="hidden")
    assert (row.value, row.original, row.change) == (0, 64, None)

"""Intervals over documents: equal to a bootstrap written as loops, their coverage, and when none is given."""

import numpy as np
import pytest
from scipy import stats

from crosslayer.stats.bootstrap import measure, over_documents

DOCUMENTS = [4, 4, 4, 7, 7, 9, 9, 9, 9, 2, 2, 2, 5, 5, 6, 8]


def by_loops(values, documents, draws=20_000):
    """Draw D − 1 whole documents at a time; the draws' distance from the mean is that of Student's t."""
    names, generator, means = sorted(set(documents)), np.random.default_rng(5), []
    for _ in range(draws):
        drawn = generator.choice(names, len(names) - 1)
        windows = [value for name in drawn for value, own in zip(values, documents, strict=True) if own == name]
        means.append(sum(windows) / len(windows))
    spread = stats.t.ppf(0.975, len(names) - 1) / stats.norm.ppf(0.975)
    return [values.mean() + spread * (end - values.mean()) for end in np.quantile(means, [0.025, 0.975])]


def test_the_interval_is_that_of_a_loop():
    values = np.random.default_rng(1).normal(size=(16, 2, 3)) + np.array(DOCUMENTS)[:, None, None]
    ends = over_documents(DOCUMENTS)(values)
    assert ends.shape == (2, 3, 2)
    low, high = by_loops(values[:, 1, 2], DOCUMENTS)
    assert ends[1, 2].tolist() == pytest.approx([low, high], abs=0.03 * (high - low))


def test_it_holds_the_truth_where_windows_of_a_document_are_alike():
    """40 documents of four windows, 0.9 of whose variance is between documents: Student's t over windows fails."""
    generator, documents, held = np.random.default_rng(2), np.repeat(np.arange(40), 4), [0, 0]
    ends = over_documents(documents.tolist())
    values = (3 * generator.normal(size=(40, 1, 500)) + generator.normal(size=(40, 4, 500))).reshape(160, 500)
    for number, interval in enumerate((np.array(ends(values)), measure(values).interval())):
        held[number] = ((interval[:, 0] < 0) & (interval[:, 1] > 0)).mean()
    assert 0.92 < held[0] < 0.98 and held[1] < 0.75


def test_the_record_says_what_an_interval_is_over():
    values = np.random.default_rng(3).normal(size=(4, 2))
    over = measure(values, over_documents([0, 1, 1, 2]))
    assert over.over == "documents" and over.n == 4 and over.interval().shape == (2, 2)
    assert over_documents([]) is None and over_documents([0, 0, 1, 1]) is None
    assert measure(values, None).over == "sequences"
    joined = over_documents([-1, -1, 0, 0])  # each joined window is a document by itself
    assert np.array_equal(joined(values), over_documents([2, 1, 3, 3])(values))
    gaps = over_documents([0, 1, 2, 3])(np.where(np.arange(2) == 1, np.nan, values))
    assert np.isfinite(gaps[0]).all() and np.isnan(gaps[1]).all()

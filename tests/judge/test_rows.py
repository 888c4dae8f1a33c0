"""Rows of a report: what is counted, and what cannot be compared."""

from types import SimpleNamespace

import pytest

from crosslayer.cache.kv_cache import Bytes
from crosslayer.judge.clock import Run
from crosslayer.judge.report import JudgedModel, Report, Row
from crosslayer.judge.rows import cache_rows, count_ratio, peak_row, retrieval_rows, time_row
from crosslayer.machine import Peak


def test_counts_have_a_verdict_without_a_spread_and_none_with_nothing():
    smaller = count_ratio(3, 4)
    assert (smaller.value, smaller.interval, smaller.verdict) == (0.75, (0.75, 0.75), "lower")
    assert count_ratio(4, 4).verdict == "no difference seen" and count_ratio(5, 4).verdict == "higher"
    assert count_ratio(0, 4) is count_ratio(4, 0) is count_ratio(None, 4) is None


def test_peak_memory_is_repeated_or_has_no_verdict():
    """The runs of one command gave ratios of 1.31 and 1.69: one pair says nothing."""

    def pairs(ratios):
        return [tuple(Run({}, Bytes(1, 1), None, Peak(bytes=size)) for size in (int(100 * r), 100)) for r in ratios]

    one = peak_row(pairs([1.31]), candidate="c")
    assert one.change.value == 1.31 and one.change.interval is None and one.verdict == "not tested"
    five = peak_row(pairs([1.31, 1.69, 1.4, 1.5, 1.6]), candidate="c")
    assert five.value == 150 and five.change.interval == pytest.approx((1.31, 1.69)) and five.verdict == "higher"
    assert "131.0%-169.0%" in five.change_text()
    unknown = [(Run({}, Bytes(1, 1), None, Peak(reason="no such system")),) * 2]
    assert peak_row(unknown, candidate="c").details == {"reason": "no such system"}


def numbers(found, original):
    """The row of all hidden numbers, at one length."""
    return retrieval_rows("c", [SimpleNamespace(length=512)] * len(found), found, original)[0]


def test_where_p_decides_it_is_printed():
    """All five numbers found, then one: the interval excludes 0, and McNemar's p does not."""
    row = numbers([True, False, False, False, False], [True] * 5)
    assert row.change.interval[1] < 0 and row.change.p == 0.125
    assert row.change.p_decides and row.is_better is None and row.change_text().endswith("p = 0.12")
    assert "p =" not in numbers([False] * 12, [True] * 12).change_text()


def test_what_was_not_tested_is_null_in_json():
    facts = {"quantity": "ttft", "unit": "s", "candidate": "c"}
    rows = [
        time_row("ttft", [8.86], [1.1], candidate="c"),
        Row(
            quantity="bytes", unit="bytes", value=3133440.0, original=6266880.0, candidate="c", change=count_ratio(1, 2)
        ),
        Row(**facts, value=1.0),
    ]
    assert [row.verdict for row in rows] == ["not tested", "lower", "not tested"]
    report = Report(rows=rows, original=None, candidates=(JudgedModel(name="c"),), seconds=0.0)
    figures = report.headline()["rows"]
    assert figures[0]["verdict"] is None and "interval" not in figures[0]
    assert figures[1]["value"] == 3133440 and isinstance(figures[1]["value"], int)  # every digit of a count
    assert "verdict" not in figures[2]


def test_a_cache_in_which_no_tensor_is_found_has_no_ratio():
    """Whose tensors are where nobody can see them: its row stays, and nothing is claimed."""
    hidden, whole = (Run({}, Bytes(size, size), None, Peak()) for size in (0, 64))
    (row,) = cache_rows(hidden, whole, candidate="hidden")
    assert (row.value, row.original, row.change) == (0, 64, None)

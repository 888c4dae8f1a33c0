"""The order in which domains are shown, and that of the retrofits on each of them."""

import numpy as np
import pytest

from crosslayer.judge.damage import Losses
from crosslayer.verbs.heal.summary import Summary, shown_order


def losses(**kl):
    """Losses of two windows of each domain."""
    values = np.repeat(list(kl.values()), 2)
    names = tuple(name for name in kl for _ in range(2))
    return Losses(values, values, values, tuple(range(len(names))), names)


def test_domains_come_in_the_same_order_however_the_retrofits_are_typed():
    first, second = losses(web=1.0, code=2.0, docs=9.0), losses(web=4.0, code=2.5, docs=9.0)
    assert shown_order([first, second], frozenset({"docs"})) == ["web", "code", "docs"]
    assert shown_order([second, first], frozenset({"docs"})) == ["web", "code", "docs"]


def test_retrofits_are_ordered_by_domain_and_each_is_paired_with_the_one_before():
    """A step of 0.02 is seen among windows whose KL spreads by 1, since what windows share cancels out."""
    generator = np.random.default_rng(0)
    shared, names = generator.normal(3, 1, 32), ("code",) * 16 + ("web",) * 16

    def end(step):
        kl = shared + step + generator.normal(0, 0.01, 32)
        return Losses(kl, kl, kl, tuple(range(32)), names)

    on_web = np.repeat([0, -1.0], 16)  # where the last of all is the first
    ends = {"high": end(0.02 + on_web), "low": end(0.0), "alike": end(0.0)}
    summary = Summary(("web", "code"), frozenset(), ends["low"], 0)
    order = summary.order(ends)
    assert list(order) == ["web", "code"]
    assert [rank.variant for rank in order["web"]][0] == "high" and order["web"][0].over_previous is None
    second, last = order["code"][1:]
    assert {order["code"][0].variant, second.variant} == {"low", "alike"} and last.variant == "high"
    low, high = second.over_previous.interval
    assert low < 0 < high
    rows = slice(0, 16)
    expected = (ends["high"].kl[rows] - ends[second.variant].kl[rows]).mean()
    assert last.over_previous.value == pytest.approx(expected)
    assert last.kl == pytest.approx(ends["high"].kl[rows].mean())
    low, high = last.over_previous.interval
    assert 0 < low < expected < high < 0.04

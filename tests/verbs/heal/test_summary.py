"""The order in which domains are shown, and that of the retrofits on each of them."""

import numpy as np
import pytest

from crosslayer.verbs.heal.summary import ranked, shown_order
from tests.helpers.losses import losses_of


def losses(**kl):
    """Losses of two windows of each domain."""
    values = np.repeat(list(kl.values()), 2)
    names = tuple(name for name in kl for _ in range(2))
    return losses_of(values, values, values, range(len(names)), names)


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
        return losses_of(kl, kl, kl, range(32), names)

    on_web = np.repeat([0, -1.0], 16)  # where the last of all is the first
    ends = {"high": end(0.02 + on_web), "low": end(0.0), "alike": end(0.0)}
    order, rows = ranked(ends, ("web", "code"), 0)
    assert list(order) == ["web", "code"] and order["web"][0] == "high"
    over = {(row.scope, row.candidate): row for row in rows}
    assert len(over) == 4 and ("web", "high") not in over  # of the first there is no difference
    first, second, last = order["code"]
    assert {first, second} == {"low", "alike"} and last == "high"
    low, high = over["code", second].change.interval
    assert low < 0 < high
    kl = {name: end.means["kl"][:16] for name, end in ends.items()}
    row = over["code", "high"]
    expected = (kl["high"] - kl[second]).mean()
    assert row.change.value == pytest.approx(expected) and row.value == pytest.approx(kl["high"].mean())
    low, high = row.change.interval
    assert 0 < low < expected < high < 0.04

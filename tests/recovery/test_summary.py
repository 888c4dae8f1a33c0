"""The order in which domains are shown."""

import numpy as np

from crosslayer.conversion.losses import Losses
from crosslayer.recovery.summary import shown_order


def losses(**kl):
    """Losses of two windows of each domain."""
    values = np.repeat(list(kl.values()), 2)
    names = tuple(name for name in kl for _ in range(2))
    return Losses(values, values, values, tuple(range(len(names))), names)


def test_domains_come_in_the_same_order_however_the_retrofits_are_typed():
    first, second = losses(web=1.0, code=2.0, docs=9.0), losses(web=4.0, code=2.5, docs=9.0)
    assert shown_order([first, second], frozenset({"docs"})) == ["web", "code", "docs"]
    assert shown_order([second, first], frozenset({"docs"})) == ["web", "code", "docs"]

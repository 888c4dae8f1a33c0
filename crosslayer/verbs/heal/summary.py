"""Rows of a state from its losses by window: against the original, the state before, and the reference.

    gap closed = 1 − mean(loss − loss of the reference) / mean(loss before training − loss of the reference)

Shapes: N windows.
"""

import math
from collections.abc import Mapping, Sequence

from crosslayer.judge.damage import Losses
from crosslayer.judge.report import ALL, Against, Row
from crosslayer.judge.rows import window_rows
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.verbs.heal.result import CLOSED


def state_rows(candidate: str, states: Sequence[Losses], trained: Losses | None, seed: int) -> list[Row]:
    """Return the rows of the last of a model's states, which begin with the one before any training.

    `trained`: losses of the trained original; without it the reference is the original.
    """
    own, rows = states[-1], window_rows(candidate, states[-1], seed)
    if trained is not None:
        rows += window_rows(candidate, own, seed, trained, Against.TRAINED)
    if len(states) > 1:
        rows += window_rows(candidate, own, seed, states[-2], Against.BEFORE)
        rows += closed_rows(candidate, states[0], own, trained, seed)
    return rows


def closed_rows(candidate: str, first: Losses, own: Losses, trained: Losses | None, seed: int) -> list[Row]:
    """Return the share of the loss gap to the reference that is closed, where there is one."""
    rows, reference = [], own.means["before"] if trained is None else trained.means["after"]
    for scope in (ALL, *dict.fromkeys(own.domains)):
        picked = own.windows_of(scope)
        gap, left = (losses.means["after"][picked] - reference[picked] for losses in (first, own))
        closed = Bootstrap(own.for_domain(scope).documents, seed).closed(gap, left)
        if closed is not None:
            against = Against.ORIGINAL if trained is None else Against.TRAINED
            facts = {"candidate": candidate, "scope": scope, "against": against, "better": "higher"}
            rows.append(Row(quantity=CLOSED, unit="share", value=closed.value, change=closed, **facts))
    return rows


def ranked(
    ends: Mapping[str, Losses], domains: Sequence[str], seed: int
) -> tuple[dict[str, tuple[str, ...]], list[Row]]:
    """Return candidates by KL on each domain, lowest first, and the difference of each to the one above.

    Ties keep the order of `ends`.
    """
    order, rows = {}, []
    for domain in domains:
        own = {name: losses.for_domain(domain) for name, losses in ends.items()}
        order[domain] = tuple(sorted(own, key=lambda name: own[name].means["kl"].mean()))
        for above, name in zip(order[domain], order[domain][1:], strict=False):
            found = window_rows(name, own[name], seed, own[above], Against.ABOVE)
            rows += [row for row in found if row.quantity == "KL" and row.scope == domain]
    return order, rows


def shown_order(before: Sequence[Losses], seen: frozenset[str]) -> list[str]:
    """Return domains in the order of the page: unseen ones first, and of each group the highest mean KL first.

    `before` has the losses of each retrofit before training; their order has no effect.
    """
    names = sorted(set(before[0].domains))
    kl = {name: math.fsum(losses.for_domain(name).means["kl"].mean() for losses in before) for name in names}
    return sorted(names, key=lambda name: (name in seen, -kl[name]))

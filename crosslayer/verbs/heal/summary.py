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
    first, last = states[0], states[-1]
    rows = window_rows(candidate, last, seed)
    if trained is not None:
        rows += window_rows(candidate, last, seed, trained, Against.TRAINED)
    if len(states) == 1:
        return rows
    rows += window_rows(candidate, last, seed, states[-2], Against.BEFORE)

    # The share of the loss gap to the reference that is closed, where there is a gap.
    for scope in (ALL, *dict.fromkeys(last.domains)):
        before, after = first.for_domain(scope), last.for_domain(scope)
        reference = after.means["before"] if trained is None else trained.for_domain(scope).means["after"]
        gap, left = (losses.means["after"] - reference for losses in (before, after))
        closed = Bootstrap(after.documents, seed).closed(gap, left)
        if closed is not None:
            against = Against.ORIGINAL if trained is None else Against.TRAINED
            place = {"candidate": candidate, "scope": scope, "against": against}
            rows.append(Row(quantity=CLOSED, unit="share", value=closed.value, change=closed, better="higher", **place))
    return rows


def ranked(
    ends: Mapping[str, Losses], domains: Sequence[str], seed: int
) -> tuple[dict[str, tuple[str, ...]], list[Row]]:
    """Return candidates by KL on each domain, lowest first, and the difference of each to the one above.

    Ties keep the order of `ends`.
    """
    order: dict[str, tuple[str, ...]] = {}
    rows: list[Row] = []
    for domain in domains:
        of_domain = {name: losses.for_domain(domain) for name, losses in ends.items()}
        order[domain] = tuple(sorted(of_domain, key=lambda name: of_domain[name].means["kl"].mean()))
        # Neighbors alone: their difference, paired by window, says whether the order holds.
        for above, name in zip(order[domain], order[domain][1:], strict=False):
            compared = window_rows(name, of_domain[name], seed, of_domain[above], Against.ABOVE)
            rows += [row for row in compared if row.quantity == "KL" and row.scope == domain]
    return order, rows


def shown_order(before: Sequence[Losses], seen: frozenset[str]) -> list[str]:
    """Return domains in the order of the page: unseen ones first, and of each group the highest mean KL first.

    `before` has the losses of each retrofit before training; their order has no effect.
    """
    names = sorted(set(before[0].domains))
    # `fsum` is exact, so that another order of the retrofits gives the same sums, and ties the same order.
    kl = {name: math.fsum(losses.for_domain(name).means["kl"].mean() for losses in before) for name in names}
    return sorted(names, key=lambda name: (name in seen, -kl[name]))

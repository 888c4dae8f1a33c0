"""Statistics of a state from its losses by window: against the original, the state before, and the reference.

    closed = 1 − mean(loss − loss of the reference) / mean(loss before training − loss of the reference)

Shapes: N windows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crosslayer.judge.damage import Losses, damage, difference
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.verbs.heal.result import DomainResult, Rank

ALL = "all windows"


@dataclass(frozen=True)
class Summary:
    """What all states are compared with."""

    domains: Sequence[str]  # in the order of the page
    seen: frozenset[str]  # those that any model was trained or calibrated on
    reference: Losses  # losses of the trained original, or of the original
    seed: int  # of the bootstrap

    def results(self, state: Losses, earlier: Losses | None, first: Losses | None) -> list[DomainResult]:
        """Return the results of a state on each domain, and last on all windows.

        `earlier` is None for the first state; `first`, the state before any training, is None for the reference itself.
        """
        results = []
        for name in (*self.domains, ALL):

            def on(losses: Losses, name: str = name) -> Losses:
                return losses if name == ALL else losses.for_domain(name)

            own, reference = on(state), on(self.reference)
            bootstrap, left = Bootstrap(own.documents, self.seed), own.after - reference.after
            keys = ("ratio_change", "kl_change", "to_reference", "closed")
            differences: dict[str, Any] = dict.fromkeys(keys)
            if earlier is not None:
                before = on(earlier)
                differences["ratio_change"] = bootstrap.ratio(own.after - before.after)
                differences["kl_change"] = bootstrap.mean(own.kl - before.kl)
            if first is not None:
                differences["to_reference"] = bootstrap.ratio(left)
                differences["closed"] = bootstrap.closed(on(first).after - reference.after, left)
            seen = bool(self.seen) if name == ALL else name in self.seen
            results.append(DomainResult(name=name, seen=seen, damage=damage(own, self.seed), **differences))
        return results

    def order(self, ends: Mapping[str, Losses]) -> dict[str, tuple[Rank, ...]]:
        """Return the retrofits ranked by final KL on each domain, lowest first, with the difference to the one before.

        Ties keep the order of `ends`.
        """
        order = {}
        for domain in self.domains:
            losses = sorted(
                ((name, each.for_domain(domain)) for name, each in ends.items()), key=lambda end: end[1].kl.mean()
            )
            ranks = []
            for number, (name, own) in enumerate(losses):
                over = difference(own, losses[number - 1][1], self.seed) if number else None
                ranks.append(Rank(variant=name, kl=float(own.kl.mean()), over_previous=over))
            order[domain] = tuple(ranks)
        return order


def shown_order(before: Sequence[Losses], seen: frozenset[str]) -> list[str]:
    """Return domains in the order of the page: unseen ones first, and of each group the highest mean KL first.

    `before` has the losses of each retrofit before training; their order has no effect.
    """
    names = sorted(set(before[0].domains))
    kl = {name: math.fsum(losses.for_domain(name).kl.mean() for losses in before) for name in names}
    return sorted(names, key=lambda name: (name in seen, -kl[name]))

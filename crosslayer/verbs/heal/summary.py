"""Statistics of a state from its losses by window: against the original, the state before, and the reference.

    closed = 1 − mean(loss − loss of the reference) / mean(loss before training − loss of the reference)

Shapes: N windows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crosslayer.judge.damage import damage, difference
from crosslayer.judge.losses import Losses
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.verbs.heal.record import DomainResult, Rank

ALL = "all windows"


@dataclass(frozen=True)
class Summary:
    """What all states are compared with."""

    domains: Sequence[str]  # in the order of the page
    seen: frozenset[str]  # those that any model was trained or calibrated on
    reference: Losses  # losses of the trained original, or of the original
    seed: int  # of the bootstrap

    def results(
        self, state: Losses, earlier: Losses | None, first: Losses | None
    ) -> tuple[tuple[DomainResult, ...], DomainResult]:
        """Return the results of a state on each domain, and on all windows.

        `earlier` is None for the first state; `first`, the state before any training, is None for the reference itself.
        """
        every = (state, earlier, first, self.reference)
        by_domain = []
        for name in self.domains:
            losses = [None if each is None else each.of(name) for each in every]
            by_domain.append(self._result_on(name, name in self.seen, *losses))
        return tuple(by_domain), self._result_on(ALL, bool(self.seen), *every)

    def _result_on(
        self,
        name: str,
        seen: bool,
        state: Losses | None,
        earlier: Losses | None,
        first: Losses | None,
        reference: Losses | None,
    ) -> DomainResult:
        assert state is not None and reference is not None
        bootstrap, left = Bootstrap(state.documents, self.seed), state.after - reference.after
        return DomainResult(
            name=name,
            seen=seen,
            damage=damage(state, self.seed),
            ratio_change=None if earlier is None else bootstrap.ratio(state.after - earlier.after),
            kl_change=None if earlier is None else bootstrap.mean(state.kl - earlier.kl),
            to_reference=None if first is None else bootstrap.ratio(left),
            closed=None if first is None else bootstrap.closed(first.after - reference.after, left),
        )

    def order(self, ends: Mapping[str, Losses]) -> dict[str, tuple[Rank, ...]]:
        """Return the retrofits ranked by final KL on each domain, lowest first, with the difference to the one before.

        Ties keep the order of `ends`.
        """
        order = {}
        for domain in self.domains:
            losses = {name: every.of(domain) for name, every in ends.items()}
            ranks, before = [], None
            for name in sorted(losses, key=lambda name: float(losses[name].kl.mean())):
                own = losses[name]
                over = None if before is None else difference(own, before, self.seed)
                ranks.append(Rank(variant=name, kl=float(own.kl.mean()), over_previous=over))
                before = own
            order[domain] = tuple(ranks)
        return order


def shown_order(before: Sequence[Losses], seen: frozenset[str]) -> list[str]:
    """Return domains in the order of the page: unseen ones first, and of each group the highest mean KL first.

    `before` has the losses of each retrofit before training; their order has no effect.
    """
    names = sorted(set(before[0].domains))
    kl = {name: math.fsum(losses.of(name).kl.mean() for losses in before) for name in names}
    return sorted(names, key=lambda name: (name in seen, -kl[name]))

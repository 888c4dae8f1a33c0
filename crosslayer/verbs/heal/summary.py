"""What losses window by window say of a state: against the original, the state before, and the reference.

    closed = 1 − mean(loss − loss of the reference) / mean(loss before training − loss of the reference)

Shapes: N windows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosslayer.stats.bootstrap import Bootstrap, percentiles
from crosslayer.verbs.heal.record import Estimate, Place, Standing
from crosslayer.verbs.retrofit.damage import damage
from crosslayer.verbs.retrofit.losses import Losses

ALL = "all windows"


@dataclass(frozen=True)
class Summary:
    """What all states are compared by.

    Attributes:
        domains: in the order in which they are shown.
        seen: those that any model was fitted to or trained on.
        reference: losses (N,) of the trained original, or of the original.
        trained: whether it is the trained one.
        seed: of the bootstrap.

    """

    domains: Sequence[str]
    seen: frozenset[str]
    reference: np.ndarray
    trained: bool
    seed: int

    def standings(
        self, state: Losses, earlier: Losses | None, first: Losses | None
    ) -> tuple[tuple[Standing, ...], Standing]:
        """Return how a state stands on each domain, and on all windows.

        Args:
            state: its losses.
            earlier: those of the state before; None for the first.
            first: those before any training; None for the reference itself.

        """
        names = np.array(state.domains)
        by_domain = [
            self._standing(name, name in self.seen, names == name, (state, earlier, first)) for name in self.domains
        ]
        everything = np.full(len(names), True)
        return tuple(by_domain), self._standing(ALL, bool(self.seen), everything, (state, earlier, first))

    def order(self, ends: Mapping[str, Losses]) -> dict[str, tuple[Place, ...]]:
        """Return the retrofits by KL on each domain, lowest first, each beside the one before it.

        Args:
            ends: losses at the end, by retrofit.

        """
        return {
            domain: _places({name: losses.of(domain) for name, losses in ends.items()}, self.seed)
            for domain in self.domains
        }

    def _standing(
        self, name: str, seen: bool, rows: np.ndarray, states: tuple[Losses, Losses | None, Losses | None]
    ) -> Standing:
        state, earlier, first = (None if losses is None else _rows(losses, rows) for losses in states)
        assert state is not None
        bootstrap = Bootstrap(state.documents, self.seed)
        reference = self.reference[rows]
        return Standing(
            name=name,
            seen=seen,
            damage=damage(state, self.seed),
            ratio_change=None if earlier is None else _ratio(bootstrap, state.after - earlier.after),
            kl_change=None if earlier is None else _mean(bootstrap, state.kl - earlier.kl),
            to_reference=None if first is None else _ratio(bootstrap, state.after - reference),
            closed=None if first is None else _closed(bootstrap, first.after - reference, state.after - reference),
        )


def _places(ends: Mapping[str, Losses], seed: int) -> tuple[Place, ...]:
    """Return the places of retrofits by their losses on a domain; equal ones keep the order in which they came."""
    names = sorted(ends, key=lambda name: float(ends[name].kl.mean()))
    places = []
    for number, name in enumerate(names):
        over = None
        if number > 0:
            over = _mean(Bootstrap(ends[name].documents, seed), ends[name].kl - ends[names[number - 1]].kl)
        places.append(Place(arm=name, kl=float(ends[name].kl.mean()), over_previous=over))
    return tuple(places)


def shown_order(before: Sequence[Losses], seen: frozenset[str]) -> list[str]:
    """Return domains as results show them, whatever the order of the retrofits, of which each has its losses.

    Those come first that nothing saw, and of each kind those with the highest mean KL.
    """
    names = sorted(set(before[0].domains))
    kl = {name: math.fsum(losses.of(name).kl.mean() for losses in before) for name in names}
    return sorted(names, key=lambda name: (name in seen, -kl[name]))


def _rows(losses: Losses, rows: np.ndarray) -> Losses:
    documents = tuple(np.array(losses.documents)[rows].tolist())
    return Losses(losses.before[rows], losses.after[rows], losses.kl[rows], documents)


def _mean(bootstrap: Bootstrap, values: np.ndarray) -> Estimate:
    return Estimate(value=float(values.mean()), ci95=bootstrap.interval(values))


def _ratio(bootstrap: Bootstrap, difference: np.ndarray) -> Estimate:
    """Return the ratio of perplexities of which a difference of losses (N,) is the logarithm."""
    return Estimate(value=float(np.exp(difference.mean())), ci95=percentiles(np.exp(bootstrap.means(difference))))


def _closed(bootstrap: Bootstrap, gap: np.ndarray, left: np.ndarray) -> Estimate | None:
    """Return which share of a gap (N,) is closed; None where the gap's own interval reaches 0."""
    if bootstrap.interval(gap)[0] <= 0:
        return None
    draws = bootstrap.means(gap)
    shares = 1 - bootstrap.means(left) / np.where(draws > 0, draws, np.nan)
    value = float(1 - left.mean() / gap.mean())
    return Estimate(value=value, ci95=percentiles(shares[np.isfinite(shares)]))

"""What a change costs on text that it was not fitted to: perplexity and KL, paired by window, with intervals.

ratio = exp(mean(nll_after − nll_before))
"""

import numpy as np

from crosslayer.stats.bootstrap import Bootstrap, Interval, percentiles
from crosslayer.verbs.retrofit.losses import Losses
from crosslayer.verbs.retrofit.record import Damage, DomainDamage, Domains, Gain

FEWEST = 16  # windows of a domain, below which no interval is given


def damage(losses: Losses, seed: int = 0) -> Damage:
    """Summarise losses with paired bootstrap intervals, stratified by document.

    Raises:
        ValueError: there are fewer than 16 windows.

    """
    windows = len(losses.before)
    if windows < FEWEST:
        raise ValueError(f"{windows} windows are too few for an interval; use at least {FEWEST}")
    bootstrap = Bootstrap(losses.documents, seed)
    change = losses.after - losses.before  # (N,)
    return Damage(
        perplexity_before=float(np.exp(losses.before.mean())),
        perplexity_after=float(np.exp(losses.after.mean())),
        ratio=float(np.exp(change.mean())),
        ratio_ci95=percentiles(np.exp(bootstrap.means(change))),
        kl=float(losses.kl.mean()),
        kl_ci95=bootstrap.interval(losses.kl),
        windows=windows,
        documents=len(set(losses.documents)),
        strata=len(bootstrap.strata),
    )


def difference(losses: Losses, other: Losses, seed: int = 0) -> tuple[float, Interval]:
    """Return the mean KL of the first minus that of the other, paired by window, and its 95 % interval."""
    gap = losses.kl - other.kl  # (N,)
    return float(gap.mean()), Bootstrap(losses.documents, seed).interval(gap)


def by_domain(after: Losses, without: Losses | None, seen: frozenset[str], seed: int = 0) -> Domains:
    """Return the damage of each domain, the worst first among those that nothing was fitted to, then the others.

    `without`: the losses of the same wiring without W_c, where there is a W_c. `seen`: domains that were fitted to.
    """
    rows = []
    for name in dict.fromkeys(after.domains):
        own, gain = after.of(name), None
        if without is not None:
            gap, interval = difference(own, without.of(name), seed)
            gain = Gain(without=damage(without.of(name), seed), kl=gap, kl_ci95=interval)
        rows.append(DomainDamage(**dict(damage(own, seed)), name=name, seen=name in seen, gain=gain))
    rows.sort(key=lambda row: (row.seen, -row.kl))
    return Domains(domains=rows, all=damage(after, seed))

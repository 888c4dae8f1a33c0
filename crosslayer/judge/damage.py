"""The damage of a conversion on evaluation text: perplexity and KL to the original, paired by window, with intervals.

    ratio = exp(mean(nll_after − nll_before))

Shapes: N windows.
"""

import numpy as np
from pydantic import Field

from crosslayer.judge.losses import Losses
from crosslayer.output.record import Frozen
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.stats.estimate import FEWEST_DOMAINS, Estimate, new_domain

MIN_WINDOWS = 16  # per domain, for an interval


class Damage(Frozen):
    """Perplexities, their ratio and the KL to the original (nats/token), over windows."""

    perplexity_before: float
    perplexity_after: float
    ratio: Estimate
    kl: Estimate
    documents: int
    strata: int = Field(description="within which windows are resampled; 1: windows are taken as independent")


class Gain(Frozen):
    """The effect of compensation: the damage without it, and the KL with it minus without (below 0: it helps)."""

    without: Damage
    kl: Estimate


class DomainDamage(Damage):
    """The damage on a domain."""

    name: str
    seen: bool = Field(description="whether this is a calibration domain")
    gain: Gain | None = Field(description="None if nothing was fitted")


class Domains(Frozen):
    """The damage by domain, the worst unseen one first, and on all windows together."""

    domains: list[DomainDamage] = Field(min_length=1)
    all: Damage
    new_domain: Estimate | None = Field(description="KL on text of another kind, from the domains; None with too few")


def damage(losses: Losses, seed: int = 0) -> Damage:
    """Return the damage with paired bootstrap intervals, stratified by document."""
    windows = len(losses.before)
    if windows < MIN_WINDOWS:
        raise ValueError(f"an interval needs at least {MIN_WINDOWS} windows, got {windows}")
    bootstrap = Bootstrap(losses.documents, seed)
    return Damage(
        perplexity_before=float(np.exp(losses.before.mean())),
        perplexity_after=float(np.exp(losses.after.mean())),
        ratio=bootstrap.ratio(losses.after - losses.before),
        kl=bootstrap.mean(losses.kl),
        documents=len(set(losses.documents)),
        strata=len(bootstrap.strata),
    )


def difference(losses: Losses, other: Losses, seed: int = 0) -> Estimate:
    """Return the mean KL of the first minus that of the other, paired by window."""
    return Bootstrap(losses.documents, seed).mean(losses.kl - other.kl)


def by_domain(after: Losses, uncompensated: Losses | None, seen: frozenset[str], seed: int = 0) -> Domains:
    """Return the damage by domain: unseen domains first, and the worst of each kind first.

    `uncompensated`: the losses without what was fitted, None if nothing was. `seen`: the calibration domains.
    """
    rows = []
    for name in dict.fromkeys(after.domains):
        own, gain = after.of(name), None
        if uncompensated is not None:
            without = uncompensated.of(name)
            gain = Gain(without=damage(without, seed), kl=difference(own, without, seed))
        rows.append(DomainDamage(**dict(damage(own, seed)), name=name, seen=name in seen, gain=gain))
    rows.sort(key=lambda row: (row.seen, -row.kl.value))
    other = new_domain([row.kl.value for row in rows], least=0.0) if len(rows) >= FEWEST_DOMAINS else None
    return Domains(domains=rows, all=damage(after, seed), new_domain=other)

"""The damage of a conversion on evaluation text: perplexity and KL to the original, paired by window, with intervals.

    ratio = exp(mean(nll_after − nll_before))

Shapes: N windows.
"""

import numpy as np
from pydantic import Field

from crosslayer.judge.losses import Losses
from crosslayer.output.record import Frozen
from crosslayer.stats import Interval
from crosslayer.stats.bootstrap import Bootstrap, percentiles

MIN_WINDOWS = 16  # per domain, for an interval


class Damage(Frozen):
    """Perplexities, their ratio and the KL to the original (nats/token), with 95% intervals over windows."""

    perplexity_before: float
    perplexity_after: float
    ratio: float
    ratio_ci95: Interval
    kl: float
    kl_ci95: Interval
    windows: int
    documents: int
    strata: int = Field(description="within which windows are resampled; 1: windows are taken as independent")


class Gain(Frozen):
    """The effect of compensation: the damage without it, and the KL with it minus without (below 0: it helps)."""

    without: Damage
    kl: float
    kl_ci95: Interval


class DomainDamage(Damage):
    """The damage on a domain."""

    name: str
    seen: bool = Field(description="whether this is a calibration domain")
    gain: Gain | None = Field(description="None if nothing was fitted")


class Domains(Frozen):
    """The damage by domain, the worst unseen one first, and on all windows together."""

    domains: list[DomainDamage] = Field(min_length=1)
    all: Damage


def damage(losses: Losses, seed: int = 0) -> Damage:
    """Return the damage with paired bootstrap intervals, stratified by document."""
    windows = len(losses.before)
    if windows < MIN_WINDOWS:
        raise ValueError(f"an interval needs at least {MIN_WINDOWS} windows, got {windows}")
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
    """Return the mean KL of the first minus that of the other, paired by window, with its 95% interval."""
    gap = losses.kl - other.kl  # (N,)
    return float(gap.mean()), Bootstrap(losses.documents, seed).interval(gap)


def by_domain(after: Losses, uncompensated: Losses | None, seen: frozenset[str], seed: int = 0) -> Domains:
    """Return the damage by domain: unseen domains first, and the worst of each kind first.

    `uncompensated`: the losses without what was fitted, None if nothing was. `seen`: the calibration domains.
    """
    rows = []
    for name in dict.fromkeys(after.domains):
        own, gain = after.of(name), None
        if uncompensated is not None:
            gap, interval = difference(own, uncompensated.of(name), seed)
            gain = Gain(without=damage(uncompensated.of(name), seed), kl=gap, kl_ci95=interval)
        rows.append(DomainDamage(**dict(damage(own, seed)), name=name, seen=name in seen, gain=gain))
    rows.sort(key=lambda row: (row.seen, -row.kl))
    return Domains(domains=rows, all=damage(after, seed))

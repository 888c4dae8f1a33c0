"""The contents of a recovery's `record.json`: losses and KL in nats/token, times in seconds."""

from pydantic import Field

from crosslayer.judge.damage import Damage
from crosslayer.judge.retrieval import Retrieval
from crosslayer.output.record import Frozen
from crosslayer.stats.estimate import Estimate
from crosslayer.training.record import Outcome


class DomainResult(Frozen):
    """The measurements of a model's state on a domain, or on all windows.

    The reference is the trained original, or the original if it was not trained.
    """

    name: str
    seen: bool = Field(description="whether any model was trained or calibrated on this domain")
    damage: Damage = Field(description="against the untrained original")
    ratio_change: Estimate | None = Field(description="perplexity over that of the state before")
    kl_change: Estimate | None = Field(description="KL minus that of the state before")
    to_reference: Estimate | None = Field(description="perplexity over the reference's; None for the reference")
    closed: Estimate | None = Field(
        description="closed share of the first state's loss gap to the reference; None if there was no gap"
    )


class State(Outcome):
    """A model before training or after a stage; `domains` has unseen ones first, in the same order for all states."""

    name: str
    domains: tuple[DomainResult, ...] = Field(min_length=1)
    all: DomainResult
    held_out: dict[str, float] = Field(description="loss of held-out rows of the training text, by domain")
    needles: tuple[Retrieval, ...] = Field(
        default=(), description="which numbers hidden in long texts it retrieves; empty if not measured"
    )


class Variant(Frozen):
    """A retrofit and its states, the first before any training."""

    name: str
    title: str
    cache_share: float
    fit: str = Field(description="how W_c was fitted, from its report")
    states: tuple[State, ...] = Field(min_length=2)


class Rank(Frozen):
    """An entry of the ranking of retrofits by final KL on a domain."""

    variant: str
    kl: float
    over_previous: Estimate | None = Field(
        description="KL minus that of the entry before it, paired by window; None for the first"
    )

"""What `record.json` of a recovery holds: losses and KL in nats a token, times in seconds."""

from typing import Literal

from pydantic import Field

from crosslayer.output.record import Frozen
from crosslayer.stats.bootstrap import Estimate
from crosslayer.verbs.needles.lookup import Lookup
from crosslayer.verbs.retrofit.result import Damage
from crosslayer.verbs.train.record import Curve


class StageRun(Frozen):
    """How a stage went."""

    parameters: Literal["compensation", "all", "lora"]
    trained: int = Field(ge=1, description="numbers that were trained")
    steps: int = Field(ge=1)
    planned: int = Field(ge=1, description="steps of the schedule; more than `steps` where it ended early")
    tokens: int = Field(ge=1, description="that were read, padding included")
    seconds: float = Field(ge=0, description="of training steps alone")
    curve: Curve


class DomainResult(Frozen):
    """How a state of a model stands on a domain, or on all windows.

    The reference is the trained original, or the original where none was trained.
    """

    name: str
    seen: bool = Field(description="whether any model was trained on such text, or its W_c fitted to it")
    damage: Damage = Field(description="against the original as it was")
    ratio_change: Estimate | None = Field(description="perplexity over that of the state before")
    kl_change: Estimate | None = Field(description="KL minus that of the state before")
    to_reference: Estimate | None = Field(description="perplexity over the reference's; None for the reference")
    closed: Estimate | None = Field(
        description="share of the first state's gap to the reference in loss that is closed; None where there was none"
    )


class State(Frozen):
    """A model before training or after a stage; `domains` unseen ones first, in the same order for all states."""

    name: str
    skipped: str | None = Field(default=None, description="why the stage trained nothing")
    stopped: str | None = Field(
        default=None, description="why the stage ended for good; the figures are those of the state before"
    )
    run: StageRun | None = None
    domains: tuple[DomainResult, ...] = Field(min_length=1)
    all: DomainResult
    held_out: dict[str, float] = Field(description="loss of rows that are held out of the text to train on, by domain")
    needles: tuple[Lookup, ...] = Field(
        default=(), description="which numbers hidden in long texts it finds; empty where it was not asked"
    )


class Variant(Frozen):
    """A retrofit and its states, the first before any training."""

    name: str
    title: str
    cache_share: float
    fit: str = Field(description="how W_c was fitted, as its report says")
    states: tuple[State, ...] = Field(min_length=2)


class Rank(Frozen):
    """A retrofit's place among all at the end, by KL on a domain."""

    variant: str
    kl: float
    over_previous: Estimate | None = Field(
        description="KL minus that of the retrofit before it, paired by window; None for the first"
    )

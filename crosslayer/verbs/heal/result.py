"""The result of a recovery. Losses and KL are in nats/token, times in seconds."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from crosslayer.judge.damage import Damage
from crosslayer.judge.retrieval import Retrieval
from crosslayer.output.record import Frozen, columns
from crosslayer.output.result import Result
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


class Recovery(Result):
    """What `crosslayer.heal` returns."""

    schema_: Literal["crosslayer/heal/7"] = Field(default="crosslayer/heal/7", alias="schema")
    name: str
    original: str
    recipe: dict[str, Any] = Field(description="the recipe with all defaults")
    objective: Literal["next-token", "response", "distill"]
    reference: Literal["trained original", "original"]
    variants: tuple[Variant, ...] = Field(min_length=1)
    order: dict[str, tuple[Rank, ...]] = Field(
        description="ranking of the retrofits by final KL, lowest first, by domain"
    )
    untrained_original: State
    trained_original: State | None = Field(description="trained with the last stage's settings, without early stop")
    original_stopped: str | None = Field(default=None, description="why training the original failed, if it did")
    left_out: dict[str, int] = Field(description="number of instructions longer than a row, by domain")
    overlapping: tuple[str, ...] = Field(
        default=(), description="domains both trained and calibrated on: their windows may hold calibration text"
    )
    windows: int
    length: int

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        """Raise if states have different domains, or variants different stages."""
        states = [state for variant in self.variants for state in variant.states]
        states += [state for state in (self.untrained_original, self.trained_original) if state is not None]
        if len({tuple(domain.name for domain in state.domains) for state in states}) != 1:
            raise ValueError("states have different domains")
        if len({len(variant.states) for variant in self.variants}) != 1:
            raise ValueError("retrofits have different numbers of stages")
        names = sorted(variant.name for variant in self.variants)
        if any(sorted(rank.variant for rank in ranks) != names for ranks in self.order.values()):
            raise ValueError("a ranking does not list exactly these retrofits")
        if list(self.order) != [domain.name for domain in self.untrained_original.domains]:
            raise ValueError("the rankings have other domains than the states")
        if (self.reference == "trained original") != (self.trained_original is not None):
            raise ValueError("the reference must be the trained original if and only if there is one")
        return self

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains, unseen ones first."""
        return tuple(domain.name for domain in self.variants[0].states[0].domains)

    @property
    def best(self) -> Variant:
        """The retrofit with the lowest final KL on the first domain."""
        return min(self.variants, key=lambda variant: variant.states[-1].domains[0].damage.kl.value)

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the command that checks the best model."""
        return (super().next_command(model, out) or "").replace("BEST", self.best.name) or None

    def frame(self) -> dict[str, list[Any]]:
        """Return each state on each domain as columns (damage_kl_value, …), which `pandas.DataFrame` takes."""
        return columns(
            {"variant": variant.name, "state": state.name, **domain.model_dump()}
            for variant in self.variants
            for state in variant.states
            for domain in state.domains
        )

    def headline(self) -> dict[str, Any]:
        """Return the KL and the perplexity ratio of each retrofit on the first domain, before and after each stage."""
        damages = {each.name: [state.domains[0].damage for state in each.states] for each in self.variants}
        return {
            "original": self.original,
            "domain": self.domains[0],
            "seen": self.untrained_original.domains[0].seen,
            "kl": {name: [round(one.kl.value, 5) for one in each] for name, each in damages.items()},
            "perplexity_ratio": {name: [round(one.ratio.value, 4) for one in each] for name, each in damages.items()},
        }

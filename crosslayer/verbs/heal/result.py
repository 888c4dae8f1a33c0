"""The result of a recovery. Losses and KL are in nats/token, times in seconds."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from crosslayer.judge.report import Against, Measured, Row
from crosslayer.judge.rows import RETRIEVAL
from crosslayer.output.record import Frozen
from crosslayer.stats.estimate import Estimate
from crosslayer.training.record import Outcome

CLOSED = "gap closed"  # the quantity: of the first state's loss gap to the reference
ORIGINAL = "original"  # the name of its states in the rows


class State(Outcome):
    """A model before training or after a stage; its rows are those of the candidate "NAME, STATE"."""

    name: str
    held_out: dict[str, float] = Field(description="loss of held-out rows of the training text, by domain")


class Variant(Frozen):
    """A retrofit and its states, the first before any training."""

    name: str
    title: str
    cache_share: float
    fit: str = Field(description="how W_c was fitted, from its report")
    states: tuple[State, ...] = Field(min_length=2)


class Recovery(Measured):
    """What `crosslayer.heal` returns.

    A row is of a state: its damage against the untrained original, the state before and the trained original, the share
    that it closed of the first state's loss gap to the reference, and the hidden numbers that it finds. `order` ranks
    the retrofits; the last states' rows against "the one above" have the differences.
    """

    schema_: Literal["crosslayer/heal/8"] = Field(default="crosslayer/heal/8", alias="schema")
    name: str
    original: str
    recipe: dict[str, Any] = Field(description="the recipe with all defaults")
    objective: Literal["next-token", "response", "distill"]
    reference: Literal["trained original", "original"]
    variants: tuple[Variant, ...] = Field(min_length=1)
    domains: tuple[str, ...] = Field(min_length=1, description="unseen ones first, the worst first of each group")
    seen: tuple[str, ...] = Field(description="those that any model was trained or calibrated on")
    order: dict[str, tuple[str, ...]] = Field(description="the retrofits by final KL, lowest first, by domain")
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
        """Raise if variants have different stages, or if the ranking, the reference or a row does not fit."""
        if len({len(variant.states) for variant in self.variants}) != 1:
            raise ValueError("retrofits have different numbers of stages")
        names = sorted(variant.name for variant in self.variants)
        if any(sorted(ranks) != names for ranks in self.order.values()):
            raise ValueError("a ranking does not list exactly these retrofits")
        if list(self.order) != list(self.domains):
            raise ValueError("the rankings have other domains than the states")
        if (self.reference == "trained original") != (self.trained_original is not None):
            raise ValueError("the reference must be the trained original if and only if there is one")
        states = [(variant.name, state) for variant in self.variants for state in variant.states]
        states += [] if self.trained_original is None else [(ORIGINAL, self.trained_original)]
        for name, state in states:
            for quantity in ("KL", "perplexity"):
                if any(self.of(name, state, quantity, domain) is None for domain in self.domains):
                    raise ValueError(f"rows: {quantity} of {name}, {state.name} is missing")
        return self

    def of(
        self, name: str, state: State, quantity: str, scope: str | None = None, against: Against = Against.ORIGINAL
    ) -> Estimate | None:
        """Return the change of a quantity in a state of a model, by default on the first domain."""
        row = self.row(f"{name}, {state.name}", quantity, self.domains[0] if scope is None else scope, against)
        return None if row is None else row.change

    def closed(self, name: str, state: State, scope: str | None = None) -> Estimate | None:
        """Return the share of the loss gap that a state closed; None if there was none."""
        against = Against.ORIGINAL if self.reference == "original" else Against.TRAINED
        return self.of(name, state, CLOSED, scope, against)

    def numbers(self, name: str, state: State) -> list[Row]:
        """Return the rows of hidden numbers that a state finds; empty if it was not asked."""
        return self.rows_of(RETRIEVAL, candidate=f"{name}, {state.name}")

    @property
    def best(self) -> Variant:
        """The retrofit with the lowest final KL on the first domain."""
        return next(variant for variant in self.variants if variant.name == self.order[self.domains[0]][0])

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the command that checks the best model."""
        return (super().next_command(model, out) or "").replace("BEST", self.best.name) or None

    def headline(self) -> dict[str, Any]:
        """Return the KL and the perplexity ratio of each retrofit on the first domain, before and after each stage."""
        figures: dict[str, dict[str, list[float]]] = {}
        for key, quantity, digits in (("kl", "KL", 5), ("perplexity_ratio", "perplexity", 4)):
            figures[key] = {}
            for variant in self.variants:
                changes = [self.of(variant.name, state, quantity) for state in variant.states]
                figures[key][variant.name] = [round(change.value, digits) for change in changes if change is not None]
        domain = self.domains[0]
        return {"original": self.original, "domain": domain, "seen": domain in self.seen, **figures}

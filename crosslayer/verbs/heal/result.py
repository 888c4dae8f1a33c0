"""The result of a recovery."""

from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.result import Result
from crosslayer.verbs.heal.record import DomainResult, Rank, State, Variant


class Recovery(Result):
    """What `crosslayer.heal` returns. Shapes: A retrofits, S states (before and after each stage), D domains."""

    schema_: Literal["crosslayer/heal/5"] = Field(default="crosslayer/heal/5", alias="schema")
    name: str
    original: str
    recipe: dict[str, Any] = Field(description="the recipe with all defaults")
    objective: Literal["text", "response", "distill"]
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
        default=(),
        description="domains both trained and calibrated on: their windows may hold calibration text",
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
        """Names of the domains, unseen ones first, (D,)."""
        return tuple(domain.name for domain in self.variants[0].states[0].domains)

    @property
    def seen(self) -> np.ndarray:
        """Whether any model was trained or calibrated on the domain, (D,) bool."""
        return np.array([domain.seen for domain in self.variants[0].states[0].domains])

    @property
    def kl(self) -> np.ndarray:
        """KL to the untrained original, in nats/token, (A, S, D)."""
        return self._of_each(lambda domain: domain.damage.kl)

    @property
    def perplexity_ratio(self) -> np.ndarray:
        """Perplexity over that of the untrained original, (A, S, D)."""
        return self._of_each(lambda domain: domain.damage.ratio)

    @property
    def closed(self) -> np.ndarray:
        """Closed share of the loss gap to the reference, (A, S, D); NaN where there was none."""
        return self._of_each(lambda domain: np.nan if domain.closed is None else domain.closed.value)

    def _of_each(self, figure: Callable[[DomainResult], float]) -> np.ndarray:
        return np.array(
            [[[*map(figure, state.domains)] for state in variant.states] for variant in self.variants], dtype=float
        )

    def headline(self) -> dict[str, Any]:
        """Return the KL and the perplexity ratio of each retrofit on the first domain, before and after each stage."""
        names = [variant.name for variant in self.variants]
        kl, ratio = self.kl[:, :, 0].round(5).tolist(), self.perplexity_ratio[:, :, 0].round(4).tolist()
        return {
            "original": self.original,
            "domain": self.domains[0],
            "seen": bool(self.seen[0]),
            "kl": dict(zip(names, kl, strict=True)),
            "perplexity_ratio": dict(zip(names, ratio, strict=True)),
        }

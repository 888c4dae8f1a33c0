"""The result of a recovery."""

from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.result import Result
from crosslayer.verbs.heal.record import DomainResult, Rank, State, Variant


class Recovery(Result):
    """What `crosslayer.heal` returns. Shapes: A retrofits, S states (before, and after each stage), D domains."""

    schema_: Literal["crosslayer/heal/4"] = Field(default="crosslayer/heal/4", alias="schema")
    name: str
    original: str
    recipe: dict[str, Any] = Field(description="as it was, with every default")
    objective: Literal["text", "response", "distill"]
    reference: Literal["trained original", "original"]
    variants: tuple[Variant, ...] = Field(min_length=1)
    order: dict[str, tuple[Rank, ...]] = Field(description="of the retrofits at the end, lowest KL first, by domain")
    untrained_original: State
    trained_original: State | None = Field(description="trained as the last stage says, to its last step")
    original_stopped: str | None = Field(
        default=None, description="why there is no trained original, where it diverged"
    )
    left_out: dict[str, int] = Field(description="instructions that are longer than a row, by domain")
    overlapping: tuple[str, ...] = Field(
        default=(),
        description="domains that were trained on and fitted to: their windows may hold text that W_c was fitted to",
    )
    windows: int
    length: int

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        """Refuse states that are not of the same domains, or variants that do not have the same stages."""
        states = [state for variant in self.variants for state in variant.states]
        states += [state for state in (self.untrained_original, self.trained_original) if state is not None]
        if len({tuple(domain.name for domain in state.domains) for state in states}) != 1:
            raise ValueError("states are of different domains")
        if len({len(variant.states) for variant in self.variants}) != 1:
            raise ValueError("retrofits have different numbers of stages")
        names = sorted(variant.name for variant in self.variants)
        if any(sorted(place.variant for place in places) != names for places in self.order.values()):
            raise ValueError("an order is not of these retrofits")
        if list(self.order) != [domain.name for domain in self.untrained_original.domains]:
            raise ValueError("the orders are of other domains than the states")
        if (self.reference == "trained original") != (self.trained_original is not None):
            raise ValueError("the reference is missing, or not the one that was trained")
        return self

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains, unseen ones first, (D,)."""
        return tuple(domain.name for domain in self.variants[0].states[0].domains)

    @property
    def seen(self) -> np.ndarray:
        """Whether any model was trained on text of the domain, or its W_c fitted to it, (D,) bool."""
        return np.array([domain.seen for domain in self.variants[0].states[0].domains])

    @property
    def kl(self) -> np.ndarray:
        """KL to the original as it was, in nats a token, (A, S, D)."""
        return self._of_each(lambda domain: domain.damage.kl)

    @property
    def perplexity_ratio(self) -> np.ndarray:
        """Perplexity over that of the original as it was, (A, S, D)."""
        return self._of_each(lambda domain: domain.damage.ratio)

    @property
    def closed(self) -> np.ndarray:
        """Share of the gap to the reference that is closed, (A, S, D); NaN where there was none."""
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

"""The result of a recovery."""

from typing import Any

import numpy as np

from crosslayer.output.page import Page
from crosslayer.output.result import Result
from crosslayer.verbs.heal import page, words
from crosslayer.verbs.heal.record import RecoveryRecord, Standing


class Recovery(RecoveryRecord, Result):
    """What `crosslayer.heal` returns. Shapes: A retrofits, S states (before, and after each stage), D domains."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains, unseen ones first, (D,)."""
        return tuple(domain.name for domain in self.arms[0].states[0].domains)

    @property
    def seen(self) -> np.ndarray:
        """Whether any model was trained on text of the domain, or its W_c fitted to it, (D,) bool."""
        return np.array([domain.seen for domain in self.arms[0].states[0].domains])

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

    def sentences(self) -> list[str]:
        """Return the result in sentences."""
        return words.sentences(self)

    def layout(self) -> Page:
        """Return the parts of the page."""
        return page.layout(self)

    def headline(self) -> dict[str, Any]:
        """Return, for each retrofit, the KL on the first domain before and after every stage."""
        first = self.domains[0]
        return {
            "original": self.original,
            "domain": first,
            "seen": bool(self.seen[0]),
            "kl": {arm.name: [round(state.domains[0].damage.kl, 5) for state in arm.states] for arm in self.arms},
            "perplexity_ratio": {
                arm.name: [round(state.domains[0].damage.ratio, 4) for state in arm.states] for arm in self.arms
            },
        }

    def _of_each(self, figure: Any) -> np.ndarray:
        def row(domains: tuple[Standing, ...]) -> list[float]:
            return [figure(domain) for domain in domains]

        return np.array([[row(state.domains) for state in arm.states] for arm in self.arms], dtype=float)

"""The result of a training run."""

from typing import Any

import numpy as np

from crosslayer.output.page import Page
from crosslayer.output.result import Result
from crosslayer.verbs.train.page import layout, sentences
from crosslayer.verbs.train.record import TrainingRecord


class TrainingRun(TrainingRecord, Result):
    """What `crosslayer.train` returns. Shapes: N logged entries, M evaluations, D domains in the recipe's order."""

    @property
    def logged_steps(self) -> np.ndarray:
        """Steps at which training losses were logged, (N,)."""
        return np.array(self.curve.steps)

    @property
    def losses(self) -> np.ndarray:
        """Training losses in nats a token, each the mean since the entry before, (N,)."""
        return np.array(self.curve.losses)

    @property
    def validation_steps(self) -> np.ndarray:
        """Steps after which the validation loss was measured, (M,)."""
        return np.array([entry.step for entry in self.validation])

    @property
    def validation_losses(self) -> np.ndarray:
        """Validation losses in nats a token, (M, D)."""
        return np.array([[entry.losses[domain.name] for domain in self.domains] for entry in self.validation])

    @property
    def final_loss(self) -> float:
        """The last validation loss, mean over domains with the shares that they had in training."""
        last = self.validation[-1].losses
        return sum(domain.share * last[domain.name] for domain in self.domains)

    def layout(self) -> Page:
        """Return the parts of the page."""
        return layout(self)

    def sentences(self) -> list[str]:
        """Return what was found, in sentences."""
        return sentences(self)

    def headline(self) -> dict[str, Any]:
        """Return name, seed, tokens, and the validation losses at the end."""
        return {
            "name": self.name,
            "seed": self.seed,
            "parameters": self.model.parameters,
            "steps": self.steps,
            "tokens": self.tokens,
            "final_loss": round(self.final_loss, 5),
            "losses": {name: round(loss, 5) for name, loss in self.validation[-1].losses.items()},
            "seconds": round(self.seconds, 1),
        }

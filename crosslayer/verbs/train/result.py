"""The result of a training run."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from crosslayer.output.result import Result
from crosslayer.training.record import Curve, DepthMixing, Snapshot, TrainedDomain, TrainedModel, Validation


class TrainingRun(Result):
    """What `crosslayer.train` returns. Shapes: N logged entries, M evaluations, D domains in the recipe's order."""

    schema_: Literal["crosslayer/train/4"] = Field(default="crosslayer/train/4", alias="schema")
    name: str
    seed: int
    recipe: dict[str, Any] = Field(description="with every default")
    model: TrainedModel
    domains: tuple[TrainedDomain, ...] = Field(min_length=1)
    curve: Curve
    validation: tuple[Validation, ...] = Field(min_length=1)
    windows: dict[str, list[float]] = Field(description="last validation loss of every window, by domain")
    snapshots: tuple[Snapshot, ...] = ()
    depth_mixing: DepthMixing | None = Field(default=None, description="of the trained model, on the same windows")
    steps: int = Field(ge=1)
    tokens: int = Field(ge=1)
    seconds: float = Field(ge=0, description="of training steps only, over all resumed sections")
    peak_bytes: int | None = Field(description="peak memory of the first process; None if unknown")
    matrix_flops: float = Field(gt=0, description="per second, of a large matrix product on this machine")

    @model_validator(mode="after")
    def _check_domains(self) -> Self:
        names = {domain.name for domain in self.domains}
        if any(set(entry.losses) != names for entry in self.validation) or set(self.windows) != names:
            raise ValueError("validation losses and windows must be of the run's domains")
        return self

    @property
    def final_loss(self) -> float:
        """The last validation loss, averaged over domains by their share in training."""
        last = self.validation[-1].losses
        return sum(domain.share * last[domain.name] for domain in self.domains)

    def headline(self) -> dict[str, Any]:
        """Return name, seed, size, tokens and the final validation losses."""
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

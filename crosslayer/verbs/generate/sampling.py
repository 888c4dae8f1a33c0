"""How a continuation is chosen."""

from typing import Self

from pydantic import Field, model_validator

from crosslayer.output.record import Options, Seed

COLDEST, HOTTEST = 0.001, 1000.0  # temperatures; logits divided by less overflow


class Sampling(Options):
    """How many tokens are chosen, and how; temperature 0 is greedy.

    Raises:
        ValueError: the temperature is neither 0 nor from `COLDEST` to `HOTTEST`, or there are no new tokens.

    """

    max_new_tokens: int = Field(ge=1)
    temperature: float
    seed: Seed

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(f"temperature {self.temperature} cannot be used; use 0 (greedy) or {COLDEST} to {HOTTEST}")
        return self

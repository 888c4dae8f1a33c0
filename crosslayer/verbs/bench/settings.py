"""What a bench measures."""

from collections.abc import Iterable
from typing import Any, Self

from pydantic import ValidationInfo, field_validator, model_validator

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.output.record import Options, Seed

ATTENTION = ("sdpa", "eager")


class Settings(Options):
    """What is measured: every context (tokens of the prompt) with every batch size.

    `evict` says what the candidate's cache evicts, as `parse_eviction` reads it; None for nothing.

    Raises:
        ValueError: a number below 1, no context, no batch, an attention that is not offered, or an eviction that cannot
            be read.

    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int
    repeats: int
    attention: str
    seed: Seed
    evict: str | None = None

    @field_validator("contexts", "batches", mode="before")
    @classmethod
    def _unique(cls, numbers: Any, field: ValidationInfo) -> Any:
        """Take numbers of any kind of list, in their order and without repetitions."""
        if not isinstance(numbers, Iterable):
            raise ValueError(f"{field.field_name} is {numbers!r}; give a list, such as [{numbers!r}]")
        return tuple(dict.fromkeys(numbers))

    @model_validator(mode="after")
    def _check(self) -> Self:
        numbers = {
            "contexts": self.contexts,
            "batches": self.batches,
            "new_tokens": (self.new_tokens,),
            "repeats": (self.repeats,),
        }
        for name, values in numbers.items():
            if not values:
                raise ValueError(f"{name} is empty; it must be at least 1")
            if min(values) < 1:
                raise ValueError(f"{name} is {min(values)}; it must be at least 1")
        if self.attention not in ATTENTION:
            raise ValueError(f"attention {self.attention!r} is not measured; use {' or '.join(ATTENTION)}")
        if self.evict is not None:
            parse_eviction(self.evict)
        return self

"""What is asked of a model: lengths, depths, keys, and how often."""

from collections.abc import Iterable
from typing import Any, Self

from pydantic import ValidationInfo, field_validator, model_validator

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.needles.text import KEYS

SHORTEST = 256  # tokens; below, template and needles leave no haystack


class NeedleOptions(Options):
    """Every length with every depth, `samples` times.

    Raises:
        ValueError: a length below 256, a depth that is no per cent, no length or depth, more keys than there are, a
            number below 1, or an eviction that cannot be read.

    """

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    keys: int
    samples: int
    new_tokens: int
    batch: int
    evict: str | None = None
    seed: Seed

    @field_validator("lengths", "depths", mode="before")
    @classmethod
    def _unique(cls, numbers: Any, field: ValidationInfo) -> Any:
        """Take numbers of any kind of list, in their order and without repetitions."""
        if isinstance(numbers, str) or not isinstance(numbers, Iterable):
            raise ValueError(f"{field.field_name} is {numbers!r}; give a list of whole numbers")
        unique = tuple(dict.fromkeys(numbers))
        if not unique:
            raise ValueError(f"{field.field_name} is empty; give at least one")
        return unique

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.lengths) < SHORTEST:
            raise ValueError(f"length {min(self.lengths)} is too short; use at least {SHORTEST} tokens")
        wrong = [depth for depth in self.depths if not 0 <= depth <= 100]
        if wrong:
            raise ValueError(f"depth {wrong[0]} is no per cent; use 0 (the beginning) to 100 (the end)")
        if not 1 <= self.keys <= len(KEYS):
            raise ValueError(f"keys is {self.keys}; use 1 to {len(KEYS)}")
        for name in ("samples", "new_tokens", "batch"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}; it must be at least 1")
        if self.evict is not None:
            parse_eviction(self.evict)
        return self

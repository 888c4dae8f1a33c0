"""What a bench measures."""

from typing import Self

from pydantic import model_validator

from crosslayer.output.record import Options

ATTENTION = ("sdpa", "eager")


class Settings(Options):
    """What is measured: every context (tokens of the prompt) with every batch size.

    Raises:
        ValueError: a number below 1, no context, no batch, or an attention that is not offered.

    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int
    repeats: int
    attention: str
    seed: int

    @model_validator(mode="after")
    def _check(self) -> Self:
        numbers = {
            "context": self.contexts,
            "batch": self.batches,
            "new-tokens": (self.new_tokens,),
            "repeats": (self.repeats,),
        }
        for name, values in numbers.items():
            if not values:
                raise ValueError(f"{name} is empty; it must be at least 1")
            if min(values) < 1:
                raise ValueError(f"{name} is {min(values)}; it must be at least 1")
        if self.attention not in ATTENTION:
            raise ValueError(f"attention {self.attention!r} is not measured; use {' or '.join(ATTENTION)}")
        return self

"""What a retrofit is asked for: plain options, checked against one another as far as that needs no method."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from crosslayer.core.method import Method
from crosslayer.core.methods import Entry, to_entry
from crosslayer.core.options import check_choice
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.retrofit.moments import ALONE, FITS, REFITS

SELECTS = ("similarity", "greedy", "correlation", "distance")
Budget = Annotated[float, Field(allow_inf_nan=True)] | None  # our own message says what a budget is


class RetrofitOptions(Options):
    """The options of `crosslayer retrofit`; `request.py` has what they mean for a method.

    Raises:
        ValueError: an option is out of range, or two contradict each other.

    """

    method: str | dict[str, Any] | None = None
    layers: str = "top-half"
    kv_budget: Budget = None
    kv_context: int | None = None
    kl_budget: Budget = None
    compensation: str | None = None
    bias: bool = False
    target: str | None = None
    groups: int = Field(default=1, ge=1)
    merge: str = "first"
    part: str | None = None
    select: str | None = None
    threshold: float = Field(default=0.5, ge=-1, le=1)
    size: int = 4
    count: int | None = Field(default=None, ge=1)
    windows: int = 96
    calibration: int = Field(default=128, ge=1)
    length: int = Field(default=512, ge=2)
    needles: bool = True
    seed: Seed = 0
    bos: str = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        choosers = [value for value in (self.method, self.kv_budget, self.kl_budget) if value is not None]
        if len(choosers) != 1:
            raise ValueError("give `method`, or `kv_budget` or `kl_budget`, which choose methods and layers themselves")
        check_choice("retrofit", "compensation", self.compensation, ("none", *FITS, None))
        check_choice("retrofit", "select", self.select, (*SELECTS, None))
        for name, budget in (("kv", self.kv_budget), ("kl", self.kl_budget)):
            if budget is not None and not (math.isfinite(budget) and budget > 0):
                raise ValueError(f"`{name}_budget` {budget} is no budget; it must be a number above 0")
        if self.kv_context is not None and self.kv_context < 2:
            raise ValueError(f"`kv_context` {self.kv_context} is too short; it is a number of tokens, at least 2")
        if self.size < 2:
            raise ValueError(f"`size` {self.size} is too small; a block has at least 2 layers")
        if self.compensation in REFITS and self.target not in (None, "attention"):
            raise ValueError(
                f"`compensation` {self.compensation} refits W_o beside a W_c that writes to the stream; use `target` "
                "attention"
            )
        if self.compensation in ALONE and self.merge != "first":
            raise ValueError(
                f"`compensation` {self.compensation} makes up for followers alone, and `merge` {self.merge} also "
                "changes their leader; use ridge"
            )
        return self

    def changed(self) -> dict[str, Any]:
        """Return the options that are not at their default."""
        return self.model_dump(exclude_defaults=True)


def plain_method(method: Entry | None) -> str | dict[str, Any] | None:
    """Return a method as the plain data that options hold; a class is its name."""
    if isinstance(method, type):
        return method.name()
    if isinstance(method, Method):
        return to_entry(method)
    return dict(method) if isinstance(method, Mapping) else method

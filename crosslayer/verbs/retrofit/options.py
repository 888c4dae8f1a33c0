"""The options of a retrofit, checked against one another."""

import itertools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from crosslayer.output.record import Options, Seed
from crosslayer.verbs.retrofit.moments import FITS

QUICK_SETS = ("windows", "calibration", "length")  # what `quick` decides
ONE_OF = (
    "give one of `method`, `kv_budget`, `kl_budget` and `read_budget`; the budgets choose methods and layers themselves"
)
Budget = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None
CHOSEN = ("top-half", "auto", "auto:similarity", "auto:top-half-similarity")  # ways to choose layers
SWEPT = ("method", "layers", "size", "count", "compensation", "target", "groups")


class RetrofitOptions(Options):
    """The options of `crosslayer retrofit`, checked against one another; their defaults are those of the call."""

    method: str | dict[str, Any] | list[dict[str, Any]] | None
    layers: str | None  # None in a record whose layers were given otherwise, or found by a search
    size: int | None = Field(ge=2)
    count: int | None = Field(ge=1)
    kv_budget: Share
    kv_context: int | None = Field(ge=2)
    kl_budget: Budget
    read_budget: Share
    compensation: str | None
    target: str | None
    groups: int | None = Field(ge=1)
    part: str | None
    windows: int
    calibration: int = Field(ge=1)
    length: int = Field(ge=2)
    quick: bool
    full: bool
    seed: Seed
    bos: str
    sweep: tuple[str, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers is not None and self.layers not in CHOSEN and not self.layers.strip()[:1].isdigit():
            ways = f"{', '.join(CHOSEN)}, or groups such as 18-21,22-25"
            raise ValueError(f"`layers` must be one of {ways}, got {self.layers!r}")
        if self.compensation not in (None, "none", *FITS):
            raise ValueError(f"`compensation` must be one of none, {', '.join(FITS)}, got {self.compensation!r}")
        budgets = sum(value is not None for value in (self.kv_budget, self.kl_budget, self.read_budget))
        if budgets > 1 or (budgets == 0 and self.method is None):
            raise ValueError(ONE_OF)
        if self.quick and self.full:
            raise ValueError("`quick` and `full` exclude each other; give one of them")
        if self.sweep and (budgets or self.full):
            raise ValueError("`sweep` needs `method`, without a budget and without `full`; remove one of them")
        return self

    def variants(self) -> dict[str, "RetrofitOptions"]:
        """Return the options of every combination of swept values, by what is typed for it; without a sweep its own."""
        swept: dict[str, list[str]] = {}
        for text in self.sweep:
            key, *values = re.split("[=,]", text.replace(" ", ""))
            if key not in SWEPT or key in swept or "" in values or not 0 < len(values) == len(set(values)):
                form = f"KEY=VALUE,VALUE, each once, with a KEY of {', '.join(SWEPT)}"
                raise ValueError(f"`sweep` must be {form}, got {text!r}; for example size=2,3,4")
            swept[key] = values
        variants = {}
        for values in itertools.product(*swept.values()):
            chosen: dict[str, Any] = dict(zip(swept, values, strict=True))
            typed = " ".join(f"--{key} {value}" for key, value in chosen.items())
            variants[typed] = RetrofitOptions(**self.model_dump() | chosen)  # numbers are read from their text
        return variants

    def changed(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that differ from `defaults`, without the ones that `quick` sets."""
        decided = QUICK_SETS if self.quick else ()
        return {name: value for name, value in self if name not in decided and value != defaults[name]}

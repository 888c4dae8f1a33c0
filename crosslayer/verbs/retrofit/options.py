"""The options of a retrofit, checked against one another.

`layers` and `compensation` are texts of a name with settings, such as `top-half,size=3,count=6`.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from crosslayer.output.record import Options, Seed
from crosslayer.verbs.retrofit.moments import FITS, REFITS

QUICK_SETS = ("windows", "calibration", "length")  # what `quick` decides
ONE_OF = (
    "give one of `method`, `kv_budget`, `kl_budget` and `read_budget`; the budgets choose methods and layers themselves"
)
Budget = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None
LAYERS = {  # names with the settings that each takes
    "top-half": ("size", "count"),
    **dict.fromkeys(("auto", "auto:similarity", "auto:top-half-similarity"), ("count",)),
}
COMPENSATIONS = {
    **dict.fromkeys(("", *FITS), ("target",)),  # "": the default fit
    "mean": ("target", "groups"),
    **dict.fromkeys(("none", *REFITS), ()),
}
SWEPT = {option: option for option in ("method", "layers", "compensation")}  # what can be swept, and in which option
SWEPT |= dict.fromkeys(("size", "count"), "layers") | dict.fromkeys(("target", "groups"), "compensation")


class AskedLayers(Options):
    """What `layers` says: groups, or how to choose layers, with settings."""

    name: str  # of `LAYERS`, or groups as text
    size: int = Field(default=4, ge=2)
    count: int | None = Field(default=None, ge=1)


class AskedCompensation(Options):
    """What `compensation` says: the fit, "" for the default, and its settings."""

    name: str
    target: str | None = None
    groups: int = Field(default=1, ge=1)


def read_layers(text: str) -> AskedLayers:
    """Return what a text says, such as `18-21,22-25`, `top-half,size=3` or `auto,count=6`."""
    if text.strip()[:1].isdigit() and "=" not in text:
        return AskedLayers(name=text)
    return AskedLayers(**_settings("layers", text, LAYERS))


def read_compensation(text: str | None) -> AskedCompensation:
    """Return what a text says, such as `mean,groups=4` or `target=heads`."""
    return AskedCompensation(**_settings("compensation", text or "", COMPENSATIONS))


def _settings(option: str, text: str, takes: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Return the name, "" without one, and the settings of a text; `takes` has the settings of each name."""
    first, *words = (word.strip() for word in text.split(","))
    if "=" in first:
        first, words = "", [first, *words]
    if first not in takes:
        groups = ", or groups such as 18-21,22-25" if takes is LAYERS else ""
        raise ValueError(f"`{option}` must be one of {', '.join(filter(None, takes))}{groups}, got {text!r}")
    settings: dict[str, Any] = {"name": first}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in takes[first] or key in settings or not equals:
            forms = [f"{name}=…" for name in takes[first]]
            allowed = f"{', '.join(forms)}, each once" if forms else "no settings"
            raise ValueError(f"`{option}`: {first or 'the default'} takes {allowed}, got {word!r}")
        settings[key] = value
    return settings


class RetrofitOptions(Options):
    """The options of `crosslayer retrofit`, checked against one another; their defaults are those of the call."""

    method: str | dict[str, Any] | list[dict[str, Any]] | None
    layers: str | None  # None in a record whose layers were given otherwise, or found by a search
    kv_budget: Share
    kv_context: int | None = Field(ge=2)
    kl_budget: Budget
    read_budget: Share
    compensation: str | None
    part: str | None
    windows: int
    calibration: int = Field(ge=1)
    length: int = Field(ge=2)
    quick: bool
    full: bool
    seed: Seed
    bos: str
    sweep: tuple[str, ...]

    @field_validator("layers", "compensation")
    @classmethod
    def _check_settings(cls, text: str | None, field: ValidationInfo) -> str | None:
        try:
            if field.field_name == "compensation":
                read_compensation(text)
            elif text is not None:
                read_layers(text)
        except ValueError as error:
            line = str(error)
            raise ValueError(line if line.startswith("`") else f"`{field.field_name}`: {line}") from None
        return text

    @model_validator(mode="after")
    def _check(self) -> Self:
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
            own = {SWEPT[key]: getattr(self, SWEPT[key]) for key in swept}
            for key, value in sorted(zip(swept, values, strict=True), key=lambda pair: pair[0] != SWEPT[pair[0]]):
                option = SWEPT[key]
                kept = [word for word in (own[option] or "").split(",") if word and not word.startswith(f"{key}=")]
                own[option] = value if key == option else ",".join([*kept, f"{key}={value}"])  # instead of its own
            typed = " ".join(f"--{option} {text}" for option, text in own.items())
            variants[typed] = RetrofitOptions(**self.model_dump() | own)
        return variants

    def changed(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that differ from `defaults`, without the ones that `quick` sets."""
        decided = QUICK_SETS if self.quick else ()
        return {name: value for name, value in self if name not in decided and value != defaults[name]}

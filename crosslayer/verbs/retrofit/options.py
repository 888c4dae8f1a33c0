"""The options of a retrofit, checked against one another.

`layers` and `compensation` are texts of a name with settings, such as `auto:distance,threshold=0.6,count=6`.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from crosslayer.core.options import check_choice
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.retrofit.moments import FITS

AXES = ("depth", "bits", "rank")  # in which a cache becomes smaller
QUICK_SETS = ("windows", "calibration", "length")  # what `quick` decides
ONE_OF = (
    "give one of `method`, `kv_budget`, `kl_budget` and `read_budget`; the budgets choose methods and layers themselves"
)
Budget = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
# the settings that each name takes
LAYERS = {
    "top-half": ("size", "count"),
    "auto": ("count",),
    "auto:similarity": ("count",),
    "auto:top-half-similarity": ("count",),
    "auto:greedy": ("count",),
    "auto:distance": ("count", "threshold"),
}
COMPENSATIONS = {
    **dict.fromkeys(("", *FITS), ("target", "bias")),  # "": the default fit
    "none": (),
    "mean": ("target", "bias", "groups"),
    "refit": ("bias",),
    "refit-o": (),
}
FLAGS = ("bias",)  # settings without a value
SWEPT = {  # what can be swept: an option, or a setting of one
    "method": "method",
    "layers": "layers",
    "compensation": "compensation",
    "size": "layers",
    "count": "layers",
    "threshold": "layers",
    "target": "compensation",
    "groups": "compensation",
}


def read_settings(option: str, text: str, takes: Mapping[str, Collection[str]]) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a text such as `mean,groups=4,bias`; the name is "" if there is none.

    Raises:
        ValueError: the name is not in `takes`, or a setting is not among those that `takes` has for it.

    """
    first, *words = (word.strip() for word in text.split(","))
    if first in FLAGS or "=" in first:
        first, words = "", [first, *words]
    if first not in takes:
        raise ValueError(f"`{option}` must be one of {', '.join(filter(None, takes))}, got {text!r}")
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in takes[first] or key in settings or bool(equals) == (key in FLAGS):
            forms = [name if name in FLAGS else f"{name}=…" for name in takes[first]]
            allowed = f"{', '.join(forms)}, each once" if forms else "no settings"
            raise ValueError(f"`{option}`: {first or 'the default'} takes {allowed}; got {word!r}")
        settings[key] = value if equals else True
    return first, settings


class LayersAsked(Options):
    """What `layers` says: groups as text, or how to choose layers, with settings."""

    groups: str | None = None
    way: str = ""  # top-half or auto
    select: str | None = None  # the criterion of auto; None: the method's first
    size: int = Field(default=4, ge=2)
    count: int | None = Field(default=None, ge=1)
    threshold: float = Field(default=0.5, ge=-1, le=1)

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what a text says, such as `18-21,22-25`, `top-half,size=3` or `auto:greedy,count=6`."""
        if text.strip()[:1].isdigit():
            if "=" in text:
                raise ValueError(f"`layers` must be groups alone, such as 18-21,22-25, got {text!r}")
            return cls(groups=text)
        name, settings = read_settings("layers", text, LAYERS)
        way, _, select = name.partition(":")
        try:
            return cls(way=way, select=select or None, **settings)
        except ValueError as error:
            raise ValueError(f"`layers`: {error}") from None


class CompensationAsked(Options):
    """What `compensation` says: a fit, None for the default, and its settings."""

    fit: str | None = None
    target: str | None = None
    bias: bool = False
    groups: int = Field(default=1, ge=1)

    @classmethod
    def read(cls, text: str | None) -> Self:
        """Return what a text says, such as `mean,groups=4` or `target=heads,bias`."""
        name, settings = read_settings("compensation", text, COMPENSATIONS) if text else ("", {})
        try:
            return cls(fit=name or None, **settings)
        except ValueError as error:
            raise ValueError(f"`compensation`: {error}") from None


class RetrofitOptions(Options):
    """The options of `crosslayer retrofit`, checked against one another; their defaults are those of the call."""

    method: str | dict[str, Any] | list[dict[str, Any]] | None
    layers: str
    kv_budget: Budget
    kv_context: int | None = Field(ge=2)
    kl_budget: Budget
    read_budget: Budget
    axes: str
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

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, text: str) -> str:
        LayersAsked.read(text)
        return text

    @field_validator("compensation")
    @classmethod
    def _check_compensation(cls, text: str | None) -> str | None:
        CompensationAsked.read(text)
        return text

    @model_validator(mode="after")
    def _check(self) -> Self:
        budgets = sum(value is not None for value in (self.kv_budget, self.kl_budget, self.read_budget))
        if budgets > 1 or (budgets == 0 and self.method is None):
            raise ValueError(ONE_OF)
        if self.read_budget is not None and self.read_budget >= 1:
            raise ValueError(f"`read_budget` must be above 0 and below 1, got {self.read_budget:g}")
        if self.quick and self.full:
            raise ValueError("give one of `quick` and `full`")
        if self.sweep and (budgets or self.full):
            raise ValueError("`sweep` needs `method`, without a budget and without `full`; remove one of them")
        for axis in self.axes.split(","):
            check_choice("retrofit", "axes", axis, AXES)
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
                own[SWEPT[key]] = value if key == SWEPT[key] else _with_setting(own[SWEPT[key]], key, value)
            typed = " ".join(f"--{option} {text}" for option, text in own.items())
            variants[typed] = RetrofitOptions(**self.model_dump() | own)
        return variants

    def changed(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that differ from `defaults`, without those that `quick` decides."""
        decided = QUICK_SETS if self.quick else ()
        return {name: value for name, value in self if name not in decided and value != defaults[name]}


def _with_setting(text: str | None, key: str, value: str) -> str:
    """Return the text of an option with a setting that replaces its own."""
    kept = [word for word in (text or "").split(",") if word and not word.startswith(f"{key}=")]
    return ",".join([*kept, f"{key}={value}"])

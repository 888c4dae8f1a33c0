"""The options of a retrofit, and what they mean for its methods. An option without effect raises an error."""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from crosslayer.core.choice import ChoiceMethod
from crosslayer.core.latents import LatentMethod
from crosslayer.core.method import Compensated, Method
from crosslayer.core.methods import Entry, load_methods, method_class, method_names, to_entry
from crosslayer.core.options import check_choice
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.retrofit.moments import FITS, REFITS
from crosslayer.verbs.retrofit.search import searched_methods

SELECTS = ("similarity", "top-half-similarity", "greedy", "distance")
AXES = ("depth", "bits", "rank")  # in which a cache becomes smaller
SWEPT = ("method", "layers", "compensation", "target", "groups", "select", "size", "count")
QUICK_SETS = ("windows", "calibration", "length")  # what `quick` decides
ONE_OF = (
    "give one of `method`, `kv_budget`, `kl_budget` and `read_budget`; the budgets choose methods and layers themselves"
)
WIRED = "nothing can be fitted or searched in a model that has methods already"
Budget = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None


class RetrofitOptions(Options):
    """The options of `crosslayer retrofit`, checked against one another where no method is needed for that."""

    method: str | dict[str, Any] | list[dict[str, Any]] | None = None
    layers: str = "top-half"
    kv_budget: Budget = None
    kv_context: int | None = Field(default=None, ge=2)
    kl_budget: Budget = None
    read_budget: Budget = None
    axes: str = "depth"
    compensation: str | None = None
    bias: bool = False
    target: str | None = None
    groups: int = Field(default=1, ge=1)
    part: str | None = None
    select: str | None = None
    threshold: float = Field(default=0.5, ge=-1, le=1)
    size: int = Field(default=4, ge=2)
    count: int | None = Field(default=None, ge=1)
    windows: int = 96
    calibration: int = Field(default=128, ge=1)
    length: int = Field(default=512, ge=2)
    quick: bool = False
    full: bool = False
    seed: Seed = 0
    bos: str = "auto"
    sweep: tuple[str, ...] = ()

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
        check_choice("retrofit", "compensation", self.compensation, ("none", *FITS, None))
        check_choice("retrofit", "select", self.select, (*SELECTS, None))
        if self.compensation in REFITS and self.target not in (None, "attention"):
            raise ValueError(
                f"`compensation` {self.compensation} needs `target` attention, got {self.target}: only that "
                "W_c can be fitted together with W_o"
            )
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
        chosen: list[dict[str, Any]] = [
            dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())
        ]
        typed = [" ".join(f"--{key} {value}" for key, value in each.items()) for each in chosen]
        return {name: RetrofitOptions(**self.model_dump() | own) for name, own in zip(typed, chosen, strict=True)}

    def changed(self) -> dict[str, Any]:
        """Return the options that are not at their default."""
        return self.model_dump(exclude_defaults=True, exclude=set(QUICK_SETS) if self.quick else None)


class Request:
    """The options of a retrofit, interpreted for its methods."""

    def __init__(self, options: RetrofitOptions, post_norms: bool = False, wired: bool = False):
        """Interpret options.

        Args:
            options: what the user asked for.
            post_norms: attention's output is normed before the residual, so W_o is not refitted.
            wired: the model has methods already.

        """
        self.options, self.post_norms, self.wired = options, post_norms, wired
        # a class whose layers are still to be chosen, or methods with all their options
        self.method_class, self.methods = _methods_of(options.method)
        self.method = self.methods[0] if len(self.methods) == 1 else None
        self.axes = frozenset(options.axes.split(","))
        if self.axes & {"bits", "rank"}:
            self._take_latents()
        elif isinstance(self.method, LatentMethod):
            self.axes = frozenset(AXES)
        self.searches_tokens = options.method is None or (isinstance(options.method, str) and "{" not in options.method)
        self._take_choices()
        self.searches_choosers = isinstance(self.method, ChoiceMethod) and self.has_budget
        self.searches = self.searches_choosers or (
            self.method_class is None and self.method is None and not self.methods
        )  # a budget chooses layers
        self.part = self.select = None  # what the method drops; how layers are chosen
        if self.method_class is not None and self.method_class.parts:
            self.part = options.part or self.method_class.parts[0]
        if self.method_class is not None and options.layers == "auto":
            self.select = options.select or selects(self.method_class)[0]
        self.fit = options.compensation or self._default_fit(post_norms)
        self.calibrates = isinstance(self.method, LatentMethod)  # the method itself is fitted to text
        self.fits = self.fit not in ("none", "zero") or self.calibrates  # on calibration text
        self.adds = self.fit not in ("none", "refit-o")  # a W_c, wherever a method may have one
        self._check()
        if wired and (self.searches or self.fits or self.adds):
            raise ValueError(f"{WIRED}; give `method`, with `compensation` none")

    def _take_latents(self) -> None:
        """Give every layer a latent, where a budget is for bits or rank too."""
        if self.options.kv_budget is None or self.options.method is not None:
            raise ValueError(f"`axes` {self.options.axes} needs `kv_budget`, and no `method`")
        (cls,) = [cls for name in method_names() if issubclass(cls := method_class(name), LatentMethod)]
        self.method = cls(groups=None if "depth" in self.axes else ())

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget of KL or of reads."""
        return self.options.kl_budget is not None or self.options.read_budget is not None

    @property
    def has_choices(self) -> bool:
        """Whether layers of the retrofit attend to chosen tokens."""
        return issubclass(self.method_class or type(self.method), ChoiceMethod)

    def _take_choices(self) -> None:
        """Let a budget choose who chooses tokens for whom, if it is of reads or the method is one of chosen tokens."""
        options = self.options
        if self.method_class is not None and issubclass(self.method_class, ChoiceMethod) and self.has_budget:
            self.method, self.method_class = self.method_class(), None
        if options.method is None and options.read_budget is not None:
            (cls,) = [cls for name in method_names() if issubclass(cls := method_class(name), ChoiceMethod)]
            self.method = cls()
        named = self.method or self.method_class
        if named is not None and self.has_budget and not isinstance(named, ChoiceMethod):
            raise ValueError(ONE_OF)
        if isinstance(self.method, ChoiceMethod) and self.has_budget:
            for name in ("groups", "sparse_choosers", "chooser_heads"):
                if vars(self.method)[name]:
                    raise ValueError(f"`method` has {name} already, which a budget is to choose; remove one of them")

    def fit_of(self, methods: Sequence[Method]) -> str:
        """Return how the chosen methods are fitted: after a search there may be no layer whose W_o can be refitted."""
        if self.fit not in REFITS or any(method.grouped for method in methods):
            return self.fit
        return "layerwise" if self.adds else "none"

    def target(self, method_class: type[Method]) -> str | None:
        """Return where W_c of a method writes: `target` or the method's default; None without W_c."""
        targets = method_class.targets
        if not self.adds or not targets:
            return None
        return self.options.target if self.options.target in targets else targets[0]

    def from_groups(self, groups: list[list[int]], layers: int) -> Method:
        """Return the method on groups of layers, without W_c."""
        assert self.method_class is not None
        return self.method_class.from_groups(groups, layers, **({} if self.part is None else {"part": self.part}))

    def compensated(self, method: Method) -> Method:
        """Return a method with its W_c, where the options and the method allow one."""
        target = self.target(type(method))
        if target is None or not isinstance(method, Compensated):
            return method
        return dataclasses.replace(method, compensation=target, compensation_bias=self.options.bias)

    def _has_targets(self) -> bool:
        """Return whether any method of the request can have a W_c."""
        if self.method is not None or self.methods:
            return any(_compensation(method) is not None for method in self._whole())
        return self.method_class is None or bool(self.method_class.targets)

    def _whole(self) -> list[Method]:
        """Return the methods with all their options."""
        return self.methods if self.method is None else [self.method]

    def _default_fit(self, post_norms: bool) -> str:
        if (
            self.wired
            or not self._has_targets()
            or (self.method_class is not None and self.part not in (None, *self.method_class.targets))
        ):
            return "none"  # W_c would have to write where the dropped part wrote
        shares = any(one.grouped for one in self._whole() or [self.method_class or Method])  # so may a search
        targets = [_compensation(method) for method in self._whole()] or [self.options.target]
        return "refit" if shares and {*targets} <= {None, "attention"} and not post_norms else "layerwise"

    def _check(self) -> None:
        """Raise for an option without effect, and for a value that the methods do not have."""
        options, cls, has_class = self.options, self.method_class, not self._whole()
        targets = {target for each in ([cls] if cls else searched_methods()) for target in each.targets}
        choices = {  # valid values that depend on the method; empty: the option has no effect
            "part": cls.parts if cls else (),
            "select": selects(cls) if cls and self.select else (),
            "target": sorted(targets) if self.adds and has_class and (cls is None or len(targets) > 1) else (),
        }
        acts = {
            "layers": cls is not None,
            "threshold": self.select == "distance",
            "size": cls is not None and options.layers == "top-half",
            "count": cls is not None and options.layers in ("auto", "top-half"),
            "groups": self.fit == "mean",
            "calibration": self.fits,
            "bias": self.adds and has_class and (cls is None or bool(cls.targets)),
            "compensation": not self.adds or self._has_targets(),
        }
        for option, value in options.changed().items():
            if not acts.get(option, True) or not choices.get(option, True):
                value = "" if value is True else f" {value}"
                raise ValueError(f"`{option}`{value} has no effect with the other options; remove it")
            if option in choices:
                check_choice("retrofit", option, value, choices[option])
        if options.layers == "top-half" and (options.count or 0) % (options.size - 1):
            raise ValueError(f"`count` must be a multiple of `size` − 1 = {options.size - 1}, got {options.count}")
        chosen = self._whole() or ([cls] if cls is not None else [])
        names = " and ".join(one.name() for one in chosen)
        if chosen and options.kv_budget is not None and not self.calibrates:
            raise ValueError(
                f"`kv_budget` chooses methods and layers itself, or the bits of a `method` with latents; remove "
                f"it, or `method` {names}"
            )
        if len(chosen) > 1 and any(isinstance(one, LatentMethod | ChoiceMethod) for one in chosen):
            raise ValueError(f"`method` must be one method if layers cache latents or choose tokens, got {names}")
        if self.fit in REFITS and chosen and not any(one.grouped for one in chosen):
            raise ValueError(
                f"`compensation` {self.fit} refits W_o of layers that read another layer's states, and {names} has "
                "none; use layerwise"
            )


def plain_method(method: Entry | Sequence[Entry] | None) -> str | dict[str, Any] | list[dict[str, Any]] | None:
    """Return a method, or several, as plain data, as options hold it; of a class its name."""
    if isinstance(method, Sequence) and not isinstance(method, str):
        return [to_entry(one) for one in load_methods(method)]
    if isinstance(method, type):
        return method.name()
    if isinstance(method, Method):
        return to_entry(method)
    return dict(method) if isinstance(method, Mapping) else method


def _methods_of(value: str | dict[str, Any] | list[dict[str, Any]] | None) -> tuple[type[Method] | None, list[Method]]:
    """Return the class of a method whose layers are to be chosen, or whole methods; neither where a budget chooses."""
    if value is None:
        return None, []
    if not isinstance(value, str):
        return None, load_methods(value)
    if value.lstrip().startswith(("{", "[")):
        try:
            return None, load_methods(json.loads(value))
        except json.JSONDecodeError as error:
            raise ValueError(f"`method` must be a name, a JSON object or a list, got {value!r} ({error})") from None
        except RecursionError:
            raise ValueError("`method` must be a name or a JSON object, got JSON that is nested too deeply") from None
    cls = method_class(value)
    takes_groups = cls.from_groups.__func__ is not Method.from_groups.__func__  # type: ignore[attr-defined]
    return (cls, []) if takes_groups else (None, load_methods(value))


def _compensation(method: Method) -> str | None:
    """Return where W_c of a method writes, None without W_c."""
    return method.compensation if isinstance(method, Compensated) else None


def selects(cls: type[Method]) -> tuple[str, ...]:
    """Return the ways to choose the layers of a method; the first is the default."""
    if not cls.grouped:
        return "similarity", "top-half-similarity", "greedy"
    return ("similarity",) if cls.consecutive else ("distance", "similarity")

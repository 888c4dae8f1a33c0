"""A way to choose the methods of a retrofit and their layers, and how these are compensated."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import to_config
from crosslayer.core.method import Compensated, Method
from crosslayer.core.methods import merge_plans, to_entry
from crosslayer.core.options import check_choice
from crosslayer.corpus.windows import Windows
from crosslayer.verbs.retrofit.calibrate import POST_NORM_ERROR
from crosslayer.verbs.retrofit.convert import WIRED
from crosslayer.verbs.retrofit.moments import REFITS
from crosslayer.verbs.retrofit.options import RetrofitOptions, read_compensation
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.result import Choice

Named = Method | type[Method]


class Chosen(NamedTuple):
    """The methods with their layers, and the record of the choice."""

    methods: list[Method]
    choice: Choice


class Strategy(ABC):
    """A way to choose methods and their layers.

    Attributes:
        options: what the user asked for.
        config: the model's, as of a crosslayer decoder; None: not known.
        named: the methods that the user named, with all their options, or the class of one without.
        fit: how W_c, and W_o of readers, are fitted: one of `FITS`, or "none".
        needs: purposes of text, without "evaluation", and without "calibration" where W_c or W_o is fitted.
        targets: what W_c may be added to, where `compensation` decides.
        acts: options that have an effect on this way alone.
    """

    needs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    acts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        self.options, self.named, self.config = options, named, config
        self.post_norms = config is not None and config.components.post_norms  # so W_o is not refitted
        self.wired = config is not None and bool(config.methods)  # the model has methods already
        self.asked = read_compensation(options.compensation)
        self.fit = self.asked.name or self._default_fit()

    @abstractmethod
    def choose(self, original: Original) -> Chosen:
        """Return the methods with their layers; the original has the text that the strategy needs."""

    def forwarded(self, tokens: Mapping[str, int], layers: int) -> float:
        """Estimate how many tokens pass through a model of some layers to choose and fit; `tokens` is by purpose."""
        return sum(tokens[purpose] for purpose in self.purposes if purpose != "evaluation")

    @property
    def fits(self) -> bool:
        """Whether W_c or W_o is fitted to text."""
        return self.fit not in ("none", "zero")

    @property
    def adds(self) -> bool:
        """Whether methods get a W_c, wherever they may have one."""
        return self.fit not in ("none", "refit-o")

    @property
    def purposes(self) -> tuple[str, ...]:
        """What text is needed for."""
        fitted = ("calibration",) if self.fits and "calibration" not in self.needs else ()
        return ("evaluation", *fitted, *self.needs)

    @property
    def needs_long_text(self) -> bool:
        """Whether only long texts show the damage of a method."""
        return any(one.needs_long_text for one in self.named)

    def calibration(self, windows: Mapping[str, Windows]) -> dict[str, Tensor]:
        """Return the calibration windows (N, T) by domain; none where nothing is fitted."""
        return windows["calibration"].by_domain() if "calibration" in self.purposes else {}

    def fit_of(self, methods: Sequence[Method]) -> str | None:
        """Return how the chosen methods are fitted, None without a fit: after a search there may be no W_o to refit."""
        fit = self.fit
        if fit in REFITS and not any(method.grouped for method in methods):
            fit = "layerwise" if self.adds else "none"
        return None if fit == "none" else fit

    def compensated(self, method: Method) -> Method:
        """Return a method with its W_c, where the options and the method allow one."""
        if not self.adds or not isinstance(method, Compensated):
            return method
        target = self.asked.target if self.asked.target in method.targets else method.targets[0]
        return dataclasses.replace(method, compensation=target, compensation_bias=self.asked.bias)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise for a given option without effect, and for methods and fits that a model's config does not allow."""
        idle = {"layers", "part"} - {*self.acts}
        if "calibration" not in self.purposes:
            idle.add("calibration")
        if self.adds and not self._may_add():
            idle.add("compensation")
        for option, value in given.items():
            if option in idle:
                raise no_effect(f"`{option}` {value}")
        target, names = self.asked.target, " and ".join(one.name() for one in self.named)
        if target is not None and not (self.adds and len(self.targets) > 1):
            raise no_effect(f"`compensation` target={target}")
        if target is not None:
            check_choice("`compensation`", "target", target, self.targets)
        if self.asked.bias and not (self.adds and self.targets):
            raise no_effect("`compensation` bias")
        if self.fit in REFITS and self.named and not any(one.grouped for one in self.named):
            raise ValueError(
                f"`compensation` {self.fit} refits W_o of layers that read another layer's states, and {names} has "
                "none; use layerwise"
            )
        if self.wired and (self.adds or {*self.purposes} & {"calibration", "search"}):
            raise ValueError(f"{WIRED}; give `method`, with `compensation` none")
        whole = [to_entry(one) for one in self.named if isinstance(one, Method)]
        if whole and self.config is not None:
            to_config(self.config, whole)  # raises if they collide
        if self.fit in REFITS and self.post_norms:
            raise ValueError(POST_NORM_ERROR)

    def _default_fit(self) -> str:
        if self.wired or not self._may_add():
            return "none"
        shares = any(one.grouped for one in self.named or [Method])
        return "refit" if shares and self._written() <= {None, "attention"} and not self.post_norms else "layerwise"

    def _may_add(self) -> bool:
        """Return whether any method can have a W_c."""
        return self._written() != {None}

    def _written(self) -> set[str | None]:
        """Return what W_c of the methods is added to; None: a method has no W_c."""
        return {one.compensation if isinstance(one, Compensated) else None for one in self.named}

    def _checked(self, methods: list[Method], original: Original) -> list[Method]:
        """Return the methods; raise if the model's layers cannot share, or windows would not show the damage."""
        for method in methods:
            method.check_text(self.options.length)
        original.sublayers.check(merge_plans(methods, original.layers))
        return methods


class Given(Strategy):
    """Methods with all their options."""

    def choose(self, original: Original) -> Chosen:
        """Return the methods as they are."""
        methods = [method for method in self.named if isinstance(method, Method)]
        return Chosen(self._checked(methods, original), Choice(how="as options"))


def no_effect(option: str) -> ValueError:
    """Return the error of an option without effect."""
    return ValueError(f"{option.removesuffix(' True')} has no effect with the other options; remove it")

"""What a retrofit is asked for: its options, and what they mean for the methods at hand.

An option that would do nothing beside the others is refused.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from crosslayer.core.method import Compensated, Method
from crosslayer.core.methods import Entry, load_method, method_class, to_entry
from crosslayer.core.options import check_choice
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.retrofit.moments import ALONE, FITS, REFITS
from crosslayer.verbs.retrofit.search import searched_methods

SELECTS = ("similarity", "greedy", "correlation", "distance")
Budget = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None


class RetrofitOptions(Options):
    """The options of `crosslayer retrofit`, checked against one another as far as that needs no method."""

    method: str | dict[str, Any] | None = None
    layers: str = "top-half"
    kv_budget: Budget = None
    kv_context: int | None = Field(default=None, ge=2)
    kl_budget: Budget = None
    compensation: str | None = None
    bias: bool = False
    target: str | None = None
    groups: int = Field(default=1, ge=1)
    merge: str = "first"
    part: str | None = None
    select: str | None = None
    threshold: float = Field(default=0.5, ge=-1, le=1)
    size: int = Field(default=4, ge=2)
    count: int | None = Field(default=None, ge=1)
    windows: int = 96
    calibration: int = Field(default=128, ge=1)
    length: int = Field(default=512, ge=2)
    needles: bool = True
    seed: Seed = 0
    bos: str = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(value is not None for value in (self.method, self.kv_budget, self.kl_budget)) != 1:
            raise ValueError("give `method`, or `kv_budget` or `kl_budget`, which choose methods and layers themselves")
        check_choice("retrofit", "compensation", self.compensation, ("none", *FITS, None))
        check_choice("retrofit", "select", self.select, (*SELECTS, None))
        if self.compensation in REFITS and self.target not in (None, "attention"):
            raise ValueError(
                f"`compensation` {self.compensation} refits W_o beside a W_c that writes to the stream; use `target` "
                "attention"
            )
        if self.compensation in ALONE and self.merge != "first":
            raise ValueError(
                f"`compensation` {self.compensation} makes up for readers alone, and `merge` {self.merge} also "
                "changes their source; use ridge"
            )
        return self

    def changed(self) -> dict[str, Any]:
        """Return the options that are not at their default."""
        return self.model_dump(exclude_defaults=True)


class Request:
    """What is to be done."""

    def __init__(self, options: RetrofitOptions, post_norms: bool = False):
        """Read options; `post_norms`: the model has a norm on attention's update, through which W_o is not refitted."""
        self.options = options
        # the method whose layers are to be chosen, or the whole method that came with all its options
        self.kind, self.whole = _method_of(options.method)
        self.searches = self.kind is None and self.whole is None  # a budget chooses methods and layers
        self.part = self.select = None  # what of a layer the method acts on; how layers are chosen
        if self.kind is not None and self.kind.parts:
            self.part = options.part or self.kind.parts[0]
        if self.kind is not None and options.layers == "auto":
            self.select = options.select or selects(self.kind)[0]
        self.many_tokens = self.select == "correlation"  # as many as W_c: the choice reads the same text
        self.fit = options.compensation or self._default_fit(post_norms)
        self.fits = self.fit not in ("none", "zero")  # to calibration text
        self.adds = self.fit not in ("none", "refit-o")  # a W_c, wherever a method may have one
        self._check()

    def fit_of(self, methods: Sequence[Method]) -> str:
        """Return how the methods that were chosen are fitted: a search may end without a layer that borrows."""
        if self.fit not in REFITS or any(method.grouped for method in methods):
            return self.fit
        return "layerwise" if self.adds else "none"

    def target(self, kind: type[Method]) -> str | None:
        """Return where W_c of a method writes, None without W_c: as asked, or else the method's first choice."""
        if not self.adds or not kind.targets:
            return None
        return self.options.target if self.options.target in kind.targets else kind.targets[0]

    def from_groups(self, groups: list[list[int]], layers: int) -> Method:
        """Return the method on groups of layers, or on a part of them, without W_c."""
        assert self.kind is not None
        return self.kind.from_groups(groups, layers, **({} if self.part is None else {"part": self.part}))

    def compensated(self, method: Method) -> Method:
        """Return a method that was chosen with its W_c, if that was asked for and it may have one."""
        target = self.target(type(method))
        if target is None or not isinstance(method, Compensated):
            return method
        return dataclasses.replace(method, compensation=target, compensation_bias=self.options.bias)

    def _has_targets(self) -> bool:
        """Return whether a method has somewhere for a W_c to write, whatever part of a layer it takes away."""
        if self.whole is not None:
            return _compensation(self.whole) is not None
        return self.kind is None or bool(self.kind.targets)

    def _default_fit(self, post_norms: bool) -> str:
        if not self._has_targets() or (self.kind is not None and self.part not in (None, *self.kind.targets)):
            return "none"  # W_c writes where the part that goes has written
        if self.options.merge != "first":
            return "ridge"  # a merged source is in no layerwise target
        borrows = (self.whole or self.kind or Method).grouped  # a search may take a method on groups
        target = self.options.target if self.whole is None else _compensation(self.whole)
        return "refit" if borrows and target in (None, "attention") and not post_norms else "layerwise"

    def _check(self) -> None:
        """Refuse an option that does nothing beside the others, and a choice that the methods do not have."""
        options, kind, single = self.options, self.kind, self.whole is None
        merges = (self.whole or kind or Method).merges
        targets = {target for each in ([kind] if kind else searched_methods()) for target in each.targets}
        choices = {  # of options whose values depend on the method; none: the option does nothing
            "merge": merges if len(merges) > 1 else (),
            "part": kind.parts if kind else (),
            "select": selects(kind) if kind and self.select else (),
            "target": sorted(targets) if self.adds and single and (kind is None or len(targets) > 1) else (),
        }
        acts = {
            "layers": kind is not None,
            "threshold": self.select == "distance",
            "size": kind is not None and options.layers == "top-half",
            "count": kind is not None and options.layers == "auto",
            "groups": self.fit == "mean",
            "calibration": self.fits or self.many_tokens,
            "bias": self.adds and single and (kind is None or bool(kind.targets)),
            "compensation": not self.adds or self._has_targets(),
        }
        for option, value in options.changed().items():
            if not acts.get(option, True) or not choices.get(option, True):
                value = "" if value is True else f" {value}"
                raise ValueError(f"`{option}`{value} does nothing with these options; leave it out")
            if option in choices:
                check_choice("retrofit", option, value, choices[option])
        chosen = self.whole or kind
        if self.fit in REFITS and chosen is not None and not chosen.grouped:
            raise ValueError(
                f"`compensation` {self.fit} refits W_o of layers that attend to borrowed states, and {chosen.name()} "
                "has none; use layerwise"
            )


def plain_method(method: Entry | None) -> str | dict[str, Any] | None:
    """Return a method as the plain data that options hold; a class is its name."""
    if isinstance(method, type):
        return method.name()
    if isinstance(method, Method):
        return to_entry(method)
    return dict(method) if isinstance(method, Mapping) else method


def _method_of(asked: str | dict[str, Any] | None) -> tuple[type[Method] | None, Method | None]:
    """Return the method whose layers are to be chosen, or the whole method; neither where a budget chooses."""
    if asked is None:
        return None, None
    if isinstance(asked, dict):
        return None, load_method(asked)
    if asked.lstrip().startswith("{"):
        try:
            return None, load_method(json.loads(asked))
        except json.JSONDecodeError as error:
            raise ValueError(f"`method` {asked!r} is not JSON ({error}); write a name or an object") from None
        except RecursionError:
            raise ValueError("`method` is JSON that is nested too deeply; write a name or an object") from None
    kind = method_class(asked)
    takes_groups = kind.from_groups.__func__ is not Method.from_groups.__func__  # type: ignore[attr-defined]
    return (kind, None) if takes_groups else (None, load_method(asked))


def _compensation(method: Method) -> str | None:
    """Return where W_c of a method writes, None without W_c."""
    return method.compensation if isinstance(method, Compensated) else None


def selects(kind: type[Method]) -> tuple[str, ...]:
    """Return the ways to choose the layers of a method, by default the first."""
    if not kind.grouped:
        return ("similarity", "greedy", "correlation")
    return ("similarity",) if kind.consecutive else ("distance", "similarity")

"""What options mean for the methods at hand: an option that would do nothing beside the others is refused."""

import dataclasses
import json
from collections.abc import Sequence

from crosslayer.core.method import Compensated, Method
from crosslayer.core.methods import load_method, method_class
from crosslayer.core.options import check_choice
from crosslayer.verbs.retrofit.moments import REFITS
from crosslayer.verbs.retrofit.options import RetrofitOptions
from crosslayer.verbs.retrofit.wires import searched_methods

SINGLE, NEIGHBOURS, ANY = ("similarity", "greedy", "correlation"), ("similarity",), ("distance", "similarity")


class Request:
    """What is to be done.

    Attributes:
        options: what was asked for.
        kind: the method whose layers are to be chosen; None for a whole method, or where a budget chooses.
        whole: the method that came with all its options, None otherwise.
        post_norms: whether the model has a norm on attention's update, through which W_o is not refitted.

    Raises:
        ValueError: the method is not known, its options are wrong, or an option would do nothing.

    """

    def __init__(self, options: RetrofitOptions, post_norms: bool = False):
        self.options, self.post_norms = options, post_norms
        self.kind, self.whole = _method_of(options)
        self._refuse_idle()
        self._check_choices()

    @property
    def searches(self) -> bool:
        """Whether a budget chooses methods and layers."""
        return self.kind is None and self.whole is None

    @property
    def part(self) -> str | None:
        """What of a layer the method acts on; None where it has no choice."""
        if self.kind is None or not self.kind.parts:
            return None
        return self.options.part or self.kind.parts[0]

    @property
    def select(self) -> str | None:
        """How layers are chosen; None where they are not."""
        if self.kind is None or self.options.layers != "auto":
            return None
        return self.options.select or selects(self.kind)[0]

    @property
    def many_tokens(self) -> bool:
        """Whether the choice of layers needs as many tokens as W_c; it then reads the same."""
        return self.select == "correlation"

    @property
    def fit(self) -> str:
        """How W_c is fitted: as asked, or by default wherever there can be a W_c."""
        if self.options.compensation is not None:
            return self.options.compensation
        if not self._may_compensate():
            return "none"
        if self.options.merge != "first":
            return "ridge"  # a merged leader is in no layerwise target
        method = self.kind if self.whole is None else type(self.whole)
        borrows = method is None or method.grouped  # a search may take a method on groups
        return "refit" if borrows and self._writes_to_the_stream() and not self.post_norms else "layerwise"

    def fit_of(self, methods: Sequence[Method]) -> str:
        """Return how the methods that were chosen are fitted: a search may end without a layer that borrows."""
        if self.fit not in REFITS or any(method.grouped for method in methods):
            return self.fit
        return "layerwise" if self.adds else "none"

    def _writes_to_the_stream(self) -> bool:
        """Return whether W_c, where there is one, writes beside attention's update."""
        target = self.options.target if self.whole is None else _compensation(self.whole)
        return target in (None, "attention")

    @property
    def fits(self) -> bool:
        """Whether W_c is fitted to calibration text."""
        return self.fit not in ("none", "zero")

    @property
    def adds(self) -> bool:
        """Whether a W_c is added wherever a method may have one."""
        return self.fit not in ("none", "refit-o")

    def target(self, kind: type[Method]) -> str | None:
        """Return where W_c of a method writes, None without W_c: as asked, or else the method's first choice."""
        if not self.adds or not kind.targets:
            return None
        return self.options.target if self.options.target in kind.targets else kind.targets[0]

    def built(self, groups: list[list[int]], layers: int) -> Method:
        """Return the method whose layers were chosen, with its W_c."""
        return self.compensated(self.from_groups(groups, layers))

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

    def _may_compensate(self) -> bool:
        """Return whether there can be a W_c: it writes where the part that a method takes away has written."""
        return self._has_targets() and (self.kind is None or self.part is None or self.part in self.kind.targets)

    def _has_targets(self) -> bool:
        """Return whether a method has somewhere for a W_c to write, whatever part of a layer it takes away."""
        if self.whole is not None:
            return _compensation(self.whole) is not None
        return self.kind is None or bool(self.kind.targets)

    def _refuse_idle(self) -> None:
        """Refuse an option that would do nothing beside the others."""
        options, kind = self.options, self.kind
        named = kind is not None
        merges = (self.whole or kind or Method).merges
        acts = {
            "layers": named,
            "part": named and bool(kind.parts),
            "select": self.select is not None,
            "threshold": self.select == "distance",
            "size": named and options.layers == "top-half",
            "count": named and options.layers == "auto",
            "merge": len(merges) > 1,
            "groups": self.fit == "mean",
            "calibration": self.fits or self.many_tokens,
            "bias": self.adds and self.whole is None and (kind is None or bool(kind.targets)),
            "target": self.adds and self.whole is None and (kind is None or len(kind.targets) > 1),
            "compensation": not self.adds or self._has_targets(),
        }
        asked = options.changed()
        for option, does in acts.items():
            if option in asked and not does:
                value = "" if asked[option] is True else f" {asked[option]}"
                raise ValueError(f"`{option}`{value} does nothing with these options; leave it out")

    def _check_choices(self) -> None:
        """Refuse a choice that the methods do not have."""
        options = self.options
        if options.merge != "first":
            check_choice("retrofit", "merge", options.merge, (self.whole or self.kind or Method).merges)
        if options.part is not None and self.kind is not None:
            check_choice("retrofit", "part", options.part, self.kind.parts)
        if options.select is not None and self.kind is not None:
            check_choice("retrofit", "select", options.select, selects(self.kind))
        chosen = type(self.whole) if self.whole is not None else self.kind
        if self.fit in REFITS and chosen is not None and not chosen.grouped:
            raise ValueError(
                f"`compensation` {self.fit} refits W_o of layers that attend to borrowed states, and {chosen.name()} "
                "has none; use layerwise"
            )
        if options.target is not None:
            kinds = searched_methods() if self.kind is None else [self.kind]
            check_choice(
                "retrofit", "target", options.target, sorted({name for kind in kinds for name in kind.targets})
            )


def _method_of(options: RetrofitOptions) -> tuple[type[Method] | None, Method | None]:
    """Return the method whose layers are to be chosen, or the whole method; neither where a budget chooses."""
    asked = options.method
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
    return (kind, None) if takes_groups(kind) else (None, load_method(asked))


def takes_groups(kind: type[Method]) -> bool:
    """Return whether a method can be built from groups of layers."""
    return kind.from_groups.__func__ is not Method.from_groups.__func__  # type: ignore[attr-defined]


def _compensation(method: Method) -> str | None:
    """Return where W_c of a method writes, None without W_c."""
    return method.compensation if isinstance(method, Compensated) else None


def selects(kind: type[Method]) -> tuple[str, ...]:
    """Return the ways to choose the layers of a method, by default the first."""
    if not kind.grouped:
        return SINGLE
    return NEIGHBOURS if kind.consecutive else ANY

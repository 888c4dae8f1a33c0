"""Ways to choose the methods of a retrofit and their layers, and how these are compensated.

Here the layers are given, the top half, or chosen by similarity on text; searches have files of their own.

Shapes: L layers.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import to_config
from crosslayer.core.method import Compensated, Method
from crosslayer.core.methods import merge_plans, to_entry
from crosslayer.core.options import check_choice, parse_layers
from crosslayer.corpus.windows import Windows
from crosslayer.probe.shapes import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.verbs.diagnose.run import diagnose
from crosslayer.verbs.retrofit.convert import POST_NORM_ERROR, WIRED
from crosslayer.verbs.retrofit.moments import REFITS
from crosslayer.verbs.retrofit.options import RetrofitOptions, read_compensation, read_layers
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
    """

    needs: tuple[str, ...] = ()  # texts to read beside "evaluation"; a fit adds "calibration"
    targets: tuple[str, ...] = ()  # what W_c may be added to, where `compensation` decides
    acts: ClassVar[tuple[str, ...]] = ()  # options that have an effect on this way alone

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
    def idle(self) -> set[str]:
        """The options that have no effect: layers and part of a method are given with it, or found by a search."""
        return {"layers", "part"} - {*self.acts}

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
        return dataclasses.replace(method, compensation=target)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise for a given option without effect, and for methods and fits that a model's config does not allow."""
        idle = self.idle
        if "calibration" not in self.purposes:
            idle.add("calibration")
        if self.adds and self.written_sublayers() == {None}:
            idle.add("compensation")
        for option, value in given.items():
            if option in idle:
                raise no_effect(f"`{option}` {value}")
        target, names = self.asked.target, " and ".join(one.name() for one in self.named)
        if target is not None and not (self.adds and len(self.targets) > 1):
            raise no_effect(f"`compensation` target={target}")
        if target is not None:
            check_choice("`compensation`", "target", target, self.targets)
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
        if self.wired or self.written_sublayers() == {None}:
            return "none"
        shares = any(one.grouped for one in self.named or [Method])
        refits = shares and self.written_sublayers() <= {None, "attention"} and not self.post_norms
        return "refit" if refits else "layerwise"

    def written_sublayers(self) -> set[str | None]:
        """Return what W_c of the methods is added to; None: a method can have no W_c."""
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


class Layers(Strategy):
    """The layers of a method: as given, the top half, or chosen on text by a criterion."""

    acts = ("layers", "part")

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        (method,) = named
        assert isinstance(method, type)
        self.method, self.targets, self.layers = method, method.targets, read_layers(options.layers or "")
        self.part = options.part or next(iter(method.parts), None)  # what the method drops
        self.way, _, select = self.layers.name.partition(":")  # top-half, auto, or groups
        self.select = select or "similarity"
        self.needs = ("choice",) if self.way == "auto" else ()
        super().__init__(options, named, config)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise for given options without effect, and for values that the method does not have."""
        readers, count = self.layers.size - 1, self.layers.count  # of a block, and of all
        if self.way == "auto":
            criteria = ("similarity",) if self.method.grouped else ("similarity", "top-half-similarity")
            check_choice("`layers`", "auto", self.select, criteria)
        elif (count or 0) % readers:
            raise ValueError(f"`layers`: count must be a multiple of size − 1 = {readers}, got {count}")
        if self.way not in ("auto", "top-half") and self.config is not None:
            parse_layers(self.way, self.config.num_hidden_layers)
        if self.options.part is not None:
            if not self.method.parts:
                raise no_effect(f"`part` {self.part}")
            check_choice("retrofit", "part", self.part, self.method.parts)
        super().check(given)

    def choose(self, original: Original) -> Chosen:
        """Return the method on its layers, with W_c."""
        if self.way == "auto":
            groups = self._automatic(original)
        else:
            groups = self._top(original) if self.way == "top-half" else parse_layers(self.way, original.layers)
        method = self.compensated(self.on(groups, original.layers))
        return Chosen(self._checked([method], original), Choice(how=self.way, groups=groups))

    def on(self, groups: Groups, layers: int) -> Method:
        """Return the method on groups of layers, without W_c."""
        return self.method.from_groups(groups, layers, **({} if self.part is None else {"part": self.part}))

    def written_sublayers(self) -> set[str | None]:
        """Return `target`, by default the first of the method's."""
        return {self.asked.target or next(iter(self.targets), None)}

    def _default_fit(self) -> str:
        if self.part not in (None, *self.targets):
            return "none"  # W_c would have to write where the dropped part wrote
        return super()._default_fit()

    def _top(self, original: Original) -> Groups:
        """Return blocks of layers from the last down; for a method on single layers, each without its first."""
        size, count = self.layers.size, self.layers.count
        blocks = paper_groups(original.sublayers.shapes, size, count and count // (size - 1))
        most = len(blocks) * (size - 1)
        if count is not None and most < count:
            raise ValueError(f"`layers`: count must be at most {most} for size {size}, got {count}")
        if not blocks:
            raise ValueError(
                f"the top half has no {size} consecutive layers with the same mask; give `layers` (groups with gaps: "
                "18+20,19+21)"
            )
        return blocks if self.method.grouped else [[layer] for block in blocks for layer in block[1:]]

    def _automatic(self, original: Original) -> Groups:
        """Return the layers with the most similar attention maps, or the layers that change their input least."""
        layers, ids = original.layers, original.windows["choice"].ids  # (N, T)
        count = self.layers.count or max(1, layers // 2 // PAPER_SIZE * (PAPER_SIZE - 1))
        if count >= layers:
            raise ValueError(f"`layers`: count must be below {layers}, the number of layers of the model, got {count}")
        if self.method.grouped:
            similarity = diagnose(original.model, ids).map_similarity_without_first  # (L, L)
            groups = similar_groups(similarity, original.sublayers.shapes, count)
            reached = sum(len(group) - 1 for group in groups)
            if reached < count:
                why = "since only layers with the same mask can share"
                raise ValueError(f"`layers`: count must be at most {reached}, {why}, got {count}")
            return groups
        first = self.on([[0]], layers).plan(layers)
        if first.attends(0):
            raise ValueError(
                "`layers` auto can choose attention or whole layers, not MLPs; give the layers, such as 4,7-9"
            )
        diagnosis, lowest = diagnose(original.model, ids), 0
        similarity = diagnosis.layer_io_similarity if first.mlps[0] is None else diagnosis.attention_io_similarity
        if self.select == "top-half-similarity":
            lowest = layers // 2
            if count > layers - lowest:
                raise ValueError(f"`layers`: count must be at most {layers - lowest}, the top half, got {count}")
        chosen = lowest + np.argsort(-similarity[lowest:], kind="stable")[:count]  # of (L,)
        return [[int(layer)] for layer in sorted(chosen)]


def no_effect(option: str) -> ValueError:
    """Return the error of an option without effect."""
    return ValueError(f"{option.removesuffix(' True')} has no effect with the other options; remove it")

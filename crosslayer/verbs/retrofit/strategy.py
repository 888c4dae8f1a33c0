"""Ways to choose the methods of a retrofit and their layers, and how these are compensated.

Here the layers are given, the top half, or chosen by similarity on text; searches have files of their own.

Shapes: L layers.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from crosslayer.verbs.retrofit.options import RetrofitOptions
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
        written: what W_c of the methods is added to; None: a method can have no W_c.
        fit: how W_c, and W_o of readers, are fitted: one of `FITS`, or "none".
        fits: whether W_c or W_o is fitted to text.
        adds: whether methods get a W_c, wherever they may have one.
        purposes: what text is needed for.
        needs_long_text: whether only long texts show the damage of a method.
        idle: the options that have no effect: layers and part of a method are given with it, or found by a search.
    """

    needs: tuple[str, ...] = ()  # texts to read beside "evaluation"; a fit adds "calibration"
    targets: tuple[str, ...] = ()  # what W_c may be added to, where `compensation` decides
    acts: tuple[str, ...] = ()  # options that have an effect on this way alone
    drops_target = False  # whether a dropped part leaves W_c no place to write to

    def __init__(
        self,
        options: RetrofitOptions,
        named: Sequence[Named],
        config: CrossLayerConfig | None = None,
        written: set[str | None] | None = None,
    ):
        """Decide how the methods are compensated; `written` is what W_c is added to, None: what the methods say."""
        self.options, self.named, self.config = options, named, config
        self.post_norms = config is not None and config.components.post_norms  # so W_o is not refitted
        self.wired = config is not None and bool(config.methods)  # the model has methods already
        self.needs_long_text = any(method.needs_long_text for method in named)
        if written is None:
            written = {method.compensation if isinstance(method, Compensated) else None for method in named}
        self.written = written

        if options.compensation is not None:
            self.fit = options.compensation
        elif self.wired or self.drops_target or written == {None}:
            self.fit = "none"
        else:
            # W_o of a layer that reads others' states was not trained for them: with three sharing pairs of SmolLM2 W_c
            # alone leaves a KL of 0.311, W_o and W_c together 0.075
            shares = any(method.grouped for method in named or [Method])
            refits = shares and written <= {None, "attention"} and not self.post_norms
            self.fit = "refit" if refits else "layerwise"
        self.fits = self.fit not in ("none", "zero")
        self.adds = self.fit not in ("none", "refit-o")

        fitted = ("calibration",) if self.fits and "calibration" not in self.needs else ()
        self.purposes: tuple[str, ...] = ("evaluation", *fitted, *self.needs)
        self.idle = {"layers", "size", "count", "part"} - {*self.acts}
        if self.fit != "mean":
            self.idle.add("groups")  # of windows, each with its own mean

    @abstractmethod
    def choose(self, original: Original) -> Chosen:
        """Return the methods with their layers; the original has the text that the strategy needs."""

    def forwarded(self, tokens: Mapping[str, int], layers: int) -> float:
        """Estimate how many tokens pass through a model of some layers to choose and fit; `tokens` is by purpose."""
        return sum(tokens[purpose] for purpose in self.purposes if purpose != "evaluation")

    def calibration(self, windows: Mapping[str, Windows]) -> dict[str, Tensor]:
        """Return the calibration windows (N, T) by domain; none where nothing is fitted."""
        return windows["calibration"].by_domain() if "calibration" in self.purposes else {}

    def compensated(self, methods: Sequence[Method]) -> list[Method]:
        """Return methods with their W_c, where the options and the method allow one."""
        compensated: list[Method] = []
        for method in methods:
            if self.adds and isinstance(method, Compensated):
                # `target` is one of a search's methods: the others may not have it
                target = self.options.target if self.options.target in method.targets else method.targets[0]
                method = dataclasses.replace(method, compensation=target)
            compensated.append(method)
        return compensated

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise for a given option without effect, and for methods and fits that a model's config does not allow."""
        idle = {*self.idle}
        if "calibration" not in self.purposes:
            idle.add("calibration")
        if self.adds and self.written == {None}:
            idle.add("compensation")
        for option, value in given.items():
            if option in idle:
                raise no_effect(f"`{option}` {value}")
        target = self.options.target
        if target is not None:
            # a refit writes where W_o does, and a method with a single place has nothing to choose
            if self.options.compensation in REFITS or not (self.adds and len(self.targets) > 1):
                raise no_effect(f"`target` {target}")
            check_choice("retrofit", "target", target, self.targets)
        names = " and ".join(method.name() for method in self.named)
        if self.fit in REFITS and self.named and not any(method.grouped for method in self.named):
            raise ValueError(
                f"`compensation` {self.fit} refits W_o of layers that read another layer's states, and {names} has "
                "none; use layerwise"
            )
        if self.wired and (self.adds or {*self.purposes} & {"calibration", "search"}):
            raise ValueError(f"{WIRED}; give `method`, with `compensation` none")
        whole = [to_entry(method) for method in self.named if isinstance(method, Method)]
        if whole and self.config is not None:
            to_config(self.config, whole)  # raises if they collide
        if self.fit in REFITS and self.post_norms:
            raise ValueError(POST_NORM_ERROR)

    def _checked(self, methods: list[Method], original: Original) -> list[Method]:
        """Return the methods; raise if the model's layers cannot share, or windows would not show the damage."""
        for method in methods:
            method.check_text(self.options.length)
        original.sublayers.check(merge_plans(methods, original.model.config.num_hidden_layers))
        return methods


class Given(Strategy):
    """Methods with all their options."""

    def choose(self, original: Original) -> Chosen:
        """Return the methods as they are."""
        methods = [method for method in self.named if isinstance(method, Method)]
        return Chosen(self._checked(methods, original), Choice(how="as options"))


class Layers(Strategy):
    """The layers of a method: as given, the top half, or chosen on text by a criterion."""

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        (method,) = named
        assert isinstance(method, type)
        self.method = method
        self.targets = method.targets
        self.part = options.part or next(iter(method.parts), None)  # what the method drops
        self.drops_target = self.part not in (None, *method.targets)
        self.way, _, select = (options.layers or "").partition(":")  # top-half, auto, or groups
        self.select = select or "similarity"
        self.size = options.size or PAPER_SIZE
        acts = {"top-half": ("size", "count"), "auto": ("count",)}
        self.acts = ("layers", "part", *acts.get(self.way, ()))
        self.needs = ("choice",) if self.way == "auto" else ()
        super().__init__(options, named, config, {options.target or next(iter(method.targets), None)})

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise for given options without effect, and for values that the method does not have."""
        readers = self.size - 1  # of a block
        count = self.options.count  # of all blocks
        if self.way == "auto":
            criteria = ("similarity",) if self.method.grouped else ("similarity", "top-half-similarity")
            check_choice("`layers`", "auto", self.select, criteria)
        elif self.way == "top-half" and (count or 0) % readers:
            raise ValueError(f"`count` must be a multiple of `size` − 1 = {readers}, got {count}")
        if self.way not in ("auto", "top-half") and self.config is not None:
            parse_layers(self.way, self.config.num_hidden_layers)
        if self.options.part is not None:
            if not self.method.parts:
                raise no_effect(f"`part` {self.part}")
            check_choice("retrofit", "part", self.part, self.method.parts)
        super().check(given)

    def choose(self, original: Original) -> Chosen:
        """Return the method on its layers, with W_c."""
        layers = original.model.config.num_hidden_layers
        if self.way == "auto":
            groups = self._automatic(original)
        elif self.way == "top-half":
            # blocks from the last layer down; a method on single layers takes each without its first, which stays
            size, count = self.size, self.options.count
            blocks = paper_groups(original.sublayers.shapes, size, count and count // (size - 1))
            most = len(blocks) * (size - 1)
            if count is not None and most < count:
                raise ValueError(f"`count` must be at most {most} for `size` {size}, got {count}")
            if not blocks:
                raise ValueError(
                    f"the top half has no {size} consecutive layers with the same mask; give `layers` (groups with "
                    "gaps: 18+20,19+21)"
                )
            groups = blocks if self.method.grouped else [[layer] for block in blocks for layer in block[1:]]
        else:
            groups = parse_layers(self.way, layers)
        methods = self.compensated([self.on(groups, layers)])
        return Chosen(self._checked(methods, original), Choice(how=self.way, groups=groups))

    def on(self, groups: Groups, layers: int) -> Method:
        """Return the method on groups of layers, without W_c."""
        return self.method.from_groups(groups, layers, **({} if self.part is None else {"part": self.part}))

    def _automatic(self, original: Original) -> Groups:
        """Return the layers with the most similar attention maps, or the layers that change their input least."""
        layers = original.model.config.num_hidden_layers
        ids = original.windows["choice"].ids  # (N, T)
        # as many as the paper's blocks convert in the top half: each has one layer that stays
        count = self.options.count or max(1, layers // 2 // PAPER_SIZE * (PAPER_SIZE - 1))
        if count >= layers:
            raise ValueError(f"`count` must be below {layers}, the number of layers of the model, got {count}")
        if self.method.grouped:
            # an attention sink in the first token makes maps alike that differ in all else
            similarity = diagnose(original.model, ids).map_similarity_without_first  # (L, L)
            groups = similar_groups(similarity, original.sublayers.shapes, count)
            reached = sum(len(group) - 1 for group in groups)
            if reached < count:
                why = "since only layers with the same mask can share"
                raise ValueError(f"`count` must be at most {reached}, {why}, got {count}")
            return groups
        first = self.on([[0]], layers).plan(layers)
        if first.attends(0):
            raise ValueError(
                "`layers` auto can choose attention or whole layers, not MLPs; give the layers, such as 4,7-9"
            )
        diagnosis = diagnose(original.model, ids)
        lowest = 0
        similarity = diagnosis.layer_io_similarity if first.mlps[0] is None else diagnosis.attention_io_similarity
        if self.select == "top-half-similarity":
            lowest = layers // 2
            if count > layers - lowest:
                raise ValueError(f"`count` must be at most {layers - lowest}, the top half, got {count}")
        chosen = lowest + np.argsort(-similarity[lowest:], kind="stable")[:count]  # of (L,)
        return [[int(layer)] for layer in sorted(chosen)]


def no_effect(option: str) -> ValueError:
    """Return the error of an option without effect."""
    return ValueError(f"{option.removesuffix(' True')} has no effect with the other options; remove it")

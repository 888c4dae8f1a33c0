"""The layers of a method: as given, the top half, or by similarity on text.

Shapes: L layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.method import Method
from crosslayer.core.options import check_choice, parse_layers
from crosslayer.probe.shapes import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.verbs.diagnose.run import diagnose
from crosslayer.verbs.retrofit.options import RetrofitOptions, read_layers
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.strategy import Chosen, Named, Strategy, no_effect


class Layers(Strategy):
    """The layers of a method: as given, the top half, or chosen on text by a criterion."""

    acts = ("layers", "part")

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        (method,) = named
        assert isinstance(method, type)
        self.method, self.targets, self.layers = method, method.targets, read_layers(options.layers)
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

    def _written(self) -> set[str | None]:
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

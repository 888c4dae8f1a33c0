"""A greedy search by measured damage for the layers and methods that meet a budget.

A move assigns a method to one more layer. Each step takes the move that adds the least measured KL to the original,
after compensation, per saved share of the cache at a given context (a layer with a sliding window saves less). In deep
models moves of every n-th layer are ranked, which stand for its neighbors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans, method_class, method_names
from crosslayer.core.plan import DepthPlan
from crosslayer.output.progress import progress
from crosslayer.probe.shapes import PAPER_SIZE, CacheShare, Groups, LayerShape, may_share, paper_groups
from crosslayer.verbs.retrofit.greedy import (
    PASSES,
    TOO_SMALL,
    Baseline,
    GreedySearch,
    Step,
    search_record,
    spread_steps,
)
from crosslayer.verbs.retrofit.measure import TOKENS, SearchObjective
from crosslayer.verbs.retrofit.options import RetrofitOptions
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.strategy import Chosen, Named, Strategy

MethodClass = type[Method]
UNCHANGED = "own"  # in records: a layer that no method acts on
FIT = 3  # about how many passes the fit of a layer takes
# At most, passes of the first ranking, with `quick` too. In deep models all moves alone would take more than `PASSES`,
# and leave none for measuring again.
RANKED, QUICK_RANKED = 200, 30
Move = tuple[MethodClass, int]  # a method and the layer that it is assigned to


def searched_methods(space: str = "layers") -> list[MethodClass]:
    """Return the methods in which a budget can choose something (`Method.search_space`), by name."""
    classes = [method_class(name) for name in method_names()]
    return [cls for cls in classes if cls.search_space() == space]


def expected_passes(layers: int, most: int) -> int:
    """Estimate how many configurations a search measures, with at most `most` in its first ranking."""
    # after the ranking about one for each layer, as moves are measured again
    return min(PASSES, min(most, layers * len(searched_methods())) + layers)


@dataclass(frozen=True)
class Assignment:
    """The method of each layer, None where the layer keeps its own attention.

    With a grouped method a layer reads its source; with any other it changes on its own. `shapes` defines which layers
    may share.
    """

    classes: tuple[MethodClass | None, ...]
    shapes: tuple[LayerShape | None, ...]

    def source(self, layer: int) -> int | None:
        """Return the layer that a reader reads: the nearest unchanged layer below it that may share with it.

        Layers between them may read the same source by the same method, change on their own, or have another shape.
        """
        for below in range(layer - 1, -1, -1):
            cls = self.classes[below]
            if not may_share(self.shapes[below], self.shapes[layer]):
                continue
            if cls is None:
                return below
            # a reader by another method lacks states that this one would read
            if cls.grouped and cls is not self.classes[layer]:
                return None
        return None

    @property
    def valid(self) -> bool:
        """Whether every reader has a source, and some layer keeps its attention."""
        keeps = any(cls is None and shape is not None for cls, shape in zip(self.classes, self.shapes, strict=True))
        readers = [layer for layer, cls in enumerate(self.classes) if cls is not None and cls.grouped]
        return keeps and all(self.source(layer) is not None for layer in readers)

    def take(self, cls: MethodClass, layer: int) -> "Assignment":
        """Return the assignment with a method on one more layer."""
        return Assignment((*self.classes[:layer], cls, *self.classes[layer + 1 :]), self.shapes)

    def methods(self) -> list[Method]:
        """Return the methods with their layers, sorted by name, without W_c."""
        methods = []
        for cls in sorted({cls for cls in self.classes if cls is not None}, key=lambda cls: cls.name()):
            layers = [layer for layer, other in enumerate(self.classes) if other is cls]
            groups = [[layer] for layer in layers]
            if cls.grouped:
                # each source with all layers up to its last reader that may share with it
                last_reader = {source: layer for layer in layers if (source := self.source(layer)) is not None}
                groups = []
                for source, last in last_reader.items():
                    shape = self.shapes[source]
                    groups.append([layer for layer in range(source, last + 1) if may_share(self.shapes[layer], shape)])
            methods.append(cls.from_groups(groups, len(self.classes)))
        return methods

    @property
    def plan(self) -> DepthPlan:
        """The plan of the methods together."""
        return merge_plans(self.methods(), len(self.classes))


@dataclass
class Search(GreedySearch[Assignment, Move]):
    """A search for methods and layers, whose moves assign a method to one more layer."""

    remeasured = 6

    shapes: Sequence[LayerShape | None]  # of each layer's attention
    classes: Sequence[MethodClass] = field(default_factory=searched_methods)  # methods to try
    context: int | None = None  # tokens at which the cache is counted; None: the default of `CacheShare`
    most: int = RANKED  # moves of the first ranking

    def __post_init__(self):
        self.cache = CacheShare(self.shapes, self.context)

    def run(self, share: float | None = None, kl: float | None = None) -> Assignment:
        """Take moves until the cached share is at most `share`, or as long as the KL stays within `kl`."""
        assert (share is None) != (kl is None)
        if share is not None and not self.cache.least <= share < 1:
            raise ValueError(
                f"`kv_budget` must be from {self.cache.least:.4f} (one of {len(self.shapes)} layers) to 1, got {share}"
            )
        start = Assignment((None,) * len(self.shapes), tuple(self.shapes))
        most = -math.inf if share is None else share + 1e-9  # sums of shares are rounded
        assignment = self.descend(start, lambda assignment: self.cache.of(assignment.plan) <= most, kl)
        reached = self.cache.of(assignment.plan)
        if share is not None and reached > most:
            raise ValueError(f"`kv_budget` {share:g} cannot be reached; the search got to {reached:.4f}")
        return assignment

    def moves(self, current: Assignment) -> list[Move]:
        """Return the moves that save something and leave a valid assignment."""
        free = [
            layer for layer, shape in enumerate(self.shapes) if shape is not None and current.classes[layer] is None
        ]
        moves = [(cls, layer) for layer in free for cls in self.classes]
        return [move for move in moves if self.saved(current, move) and current.take(*move).valid]

    def take(self, current: Assignment, move: Move) -> Assignment:
        """Return the assignment with a method on one more layer."""
        return current.take(*move)

    def saved(self, current: Assignment, move: Move) -> float:
        """Return what a move saves, in units of a mean layer's keys or values."""
        cls, layer = move
        return self.cache.saved(cls.saves, layer)

    def ranked(self, start: Assignment) -> dict[Move, float]:
        """Return the cost of each move alone; in deep models of those on every n-th layer."""
        moves = self.moves(start)
        # in a deep model a layer stands for its neighbors, as the ranking must leave passes for measuring again
        step = math.ceil(len(moves) / self.most)
        return {move: self.cost(start, move, 0.0) for move in moves if move[1] % step == 0}

    def revise(self, costs: dict[Move, float], current: Assignment, taken: Move | None) -> None:
        """Give moves that were not ranked, or not possible before, the cost of the nearest layer."""
        for move in self.moves(current):
            if move not in costs:
                cls, layer = move
                known = [ranked for ranked in costs if ranked[0] is cls]
                nearest = min(known, key=lambda ranked: abs(ranked[1] - layer), default=None)
                # of a method that nothing is known of, a move comes first, and is measured
                costs[move] = -math.inf if nearest is None else costs[nearest]


class LayerSearch(Strategy):
    """A budget of bytes or of KL chooses methods and their layers, by measured damage."""

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        self.targets = tuple(sorted({target for cls in searched_methods() for target in cls.targets}))
        self.needs = ("search",) if options.quick else ("search", "trade-off")
        self.most = QUICK_RANKED if options.quick else RANKED  # moves of the first ranking
        super().__init__(options, named, config, {options.target or "attention"})

    def forwarded(self, tokens: Mapping[str, int], layers: int) -> float:
        """Estimate how many tokens pass through a model; each configuration fits about a layer."""
        searched = expected_passes(layers, self.most)
        fitted = FIT * min(TOKENS, tokens["calibration"]) / layers if self.fits else 0
        return super().forwarded(tokens, layers) + searched * (tokens["search"] + fitted)

    @torch.no_grad()
    def choose(self, original: Original) -> Chosen:
        """Return the methods that meet the budget, and the course of the search."""
        options, shapes = self.options, original.sublayers.shapes
        with progress("running the original", 0):
            objective = SearchObjective(original, self.fit if self.fits else None)
        expected = expected_passes(len(shapes), self.most)
        with progress(f"searching, about {expected} of at most {PASSES} configurations", expected) as bar:
            search = Search(
                lambda assignment: objective.kl(self.compensated(assignment.methods())),
                shapes,
                context=options.kv_context,
                most=self.most,
                bar=bar,
                expected=expected,
            )
            chosen = search.run(options.kv_budget, options.kl_budget)
        methods = self.compensated(chosen.methods())
        if not methods:
            raise ValueError(TOO_SMALL.format(options.kl_budget))

        # evenly spread steps of the search, and for the last one fixed blocks of each method
        steps = []
        for assignment, kl in spread_steps(search.curve[1:]):
            layers = {cls.name(): assignment.classes.count(cls) for cls in search.classes}
            share = search.cache.of(assignment.plan)
            steps.append(Step(self.compensated(assignment.methods()), share, kl, layers))
        baselines = {}
        for cls in search.classes if steps else ():
            blocks = fixed_blocks(cls, shapes, steps[-1].share, search.cache) if cls.grouped else None
            if blocks is not None:
                groups, share = blocks
                fixed = self.compensated([cls.from_groups(groups, len(shapes))])
                baselines[cls.name()] = Baseline(fixed, groups, share)
        names = [UNCHANGED if cls is None else cls.name() for cls in chosen.classes]
        record = search_record(objective, search.passes, names, steps, baselines)
        return Chosen(methods, Choice(how="search", search=record))


def fixed_blocks(
    cls: MethodClass, shapes: Sequence[LayerShape | None], share: float, cache: CacheShare
) -> tuple[Groups, float] | None:
    """Return blocks of equal size in the top half, like the superblocks of arXiv 2502.00439, and their cached share.

    The size is the one whose share is nearest to `share`, the paper's in case of a tie; None if no layers may share.
    """
    candidates = []
    for size in range(2, max(3, len(shapes) // 2 + 1)):  # at most one block, of the whole top half
        groups = paper_groups(list(shapes), size)
        if groups:
            reached = cache.of(cls.from_groups(groups, len(shapes)).plan(len(shapes)))
            candidates.append((abs(reached - share), size != PAPER_SIZE, groups, reached))
    return min(candidates)[2:] if candidates else None

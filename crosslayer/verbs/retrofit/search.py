"""A greedy search by measured damage for the layers and methods that meet a budget.

A move assigns a method to one more layer. Each step takes the move that adds the least measured KL to the original,
after compensation, per saved share of the cache at a given context (a layer with a sliding window saves less). All
moves are ranked once (in deep models those of every n-th layer, which stand for its neighbors). A move is measured
again before it is taken, until no other ranks better (lazy greedy).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans, method_class, method_names
from crosslayer.core.plan import DepthPlan
from crosslayer.probe.shapes import LayerShape, may_share
from crosslayer.verbs.retrofit.cache import CacheShare

MethodClass = type[Method]
OWN = "own"  # in records: a layer that no method acts on
PASSES = 300  # at most, over the search text
RANKED = 200  # at most, passes of the first ranking
REMEASURED = 6  # at most, moves that are measured again per step
Move = tuple[MethodClass, int]  # a method and the layer that it is assigned to


def searched_methods() -> list[MethodClass]:
    """Return the methods that declare what they save per layer, by name: those that a search tries."""
    classes = [method_class(name) for name in method_names()]
    return [cls for cls in classes if cls.saves]


def expected_passes(layers: int) -> int:
    """Return about how many configurations a search measures in a model of so many layers."""
    return min(PASSES, layers * len(searched_methods()) * 3 // 2)


@dataclass(frozen=True)
class Assignment:
    """The method of each layer, None where the layer keeps its own attention.

    With a grouped method a layer reads its source; with any other it changes on its own. `shapes` defines which layers
    may share; None: all of them.
    """

    classes: tuple[MethodClass | None, ...]
    shapes: tuple[LayerShape | None, ...] | None = None

    def source(self, layer: int) -> int | None:
        """Return the layer that a reader reads: the nearest unchanged layer below it that may share with it.

        Layers between them may read the same source by the same method, change on their own, or have another shape.
        """
        for below in range(layer - 1, -1, -1):
            cls = self.classes[below]
            if self._may_share(below, layer) and (cls is None or (cls.grouped and cls is not self.classes[layer])):
                return below if cls is None else None
        return None

    def _may_share(self, layer: int, other: int) -> bool:
        return self.shapes is None or may_share(self.shapes[layer], self.shapes[other])

    @property
    def valid(self) -> bool:
        """Whether every reader has a source, and some layer keeps its attention."""
        keeps_attention = False
        for layer, cls in enumerate(self.classes):
            if cls is not None and cls.grouped and self.source(layer) is None:
                return False
            keeps_attention |= cls is None and (self.shapes is None or self.shapes[layer] is not None)
        return keeps_attention

    def take(self, cls: MethodClass, layer: int) -> "Assignment":
        """Return the assignment with a method on one more layer."""
        return Assignment((*self.classes[:layer], cls, *self.classes[layer + 1 :]), self.shapes)

    def names(self) -> list[str]:
        """Return the method of each layer by name."""
        return [OWN if cls is None else cls.name() for cls in self.classes]

    def methods(self) -> list[Method]:
        """Return the methods with their layers, sorted by name, without W_c."""
        classes = sorted({cls for cls in self.classes if cls is not None}, key=lambda cls: cls.name())
        return [cls.from_groups(self._groups(cls), len(self.classes)) for cls in classes]

    def _groups(self, cls: MethodClass) -> list[list[int]]:
        """Return each source with all layers up to its last reader that may share with it, or just the layers."""
        layers = [layer for layer, other in enumerate(self.classes) if other is cls]
        if not cls.grouped:
            return [[layer] for layer in layers]
        last_reader = {source: layer for layer in layers if (source := self.source(layer)) is not None}
        return [
            [layer for layer in range(source, last + 1) if self._may_share(layer, source)]
            for source, last in last_reader.items()
        ]

    @property
    def plan(self) -> DepthPlan:
        """The plan of the methods together."""
        return merge_plans(self.methods(), len(self.classes))


@dataclass
class Search:
    """A greedy search."""

    measure: Callable[[Assignment], float]  # KL of an assignment to the original, on the search text
    shapes: Sequence[LayerShape | None]  # of each layer's attention
    classes: Sequence[MethodClass] = field(default_factory=searched_methods)  # methods to try
    context: int | None = None  # tokens at which the cache is counted; None: the default of `CacheShare`
    passes: int = 0  # number of measurements
    # the assignment after each step and its KL on the search text; first the unchanged model
    curve: list[tuple[Assignment, float]] = field(default_factory=list)

    def __post_init__(self):
        self.cache = CacheShare(self.shapes, self.context)

    def run(self, share: float | None = None, kl: float | None = None) -> Assignment:
        """Take moves until the cached share is at most `share`, or as long as the KL stays within `kl`."""
        assert (share is None) != (kl is None)
        if share is not None and not self.cache.least <= share < 1:
            raise ValueError(
                f"`kv_budget` must be from {self.cache.least:.4f} (one of {len(self.shapes)} layers) to 1, got {share}"
            )
        assignment, damage = Assignment((None,) * len(self.shapes), tuple(self.shapes)), 0.0
        self.curve = [(assignment, damage)]
        moves, refused = self._moves(assignment), set()
        step = math.ceil(len(moves) / RANKED)
        costs = {move: self._cost(assignment, move, 0.0) for move in moves if move[1] % step == 0}
        while share is None or self.cache.of(assignment.plan) > share + 1e-9:
            move = self._best(assignment, damage, costs, refused)
            if move is None:
                break
            after = damage + costs.pop(move) * self._saved(move)
            if kl is not None and after > kl:
                refused.add(move)
                continue
            assignment, damage = assignment.take(*move), after
            self.curve.append((assignment, damage))
        reached = self.cache.of(assignment.plan)
        if share is not None and reached > share + 1e-9:
            raise ValueError(
                f"`kv_budget` {share:g} was not reached in {PASSES} measurements; the search got to {reached:.4f}"
            )
        return assignment

    def _moves(self, assignment: Assignment) -> list[Move]:
        """Return the moves that save something and leave a valid assignment."""
        free = [
            layer for layer, shape in enumerate(self.shapes) if shape is not None and assignment.classes[layer] is None
        ]
        moves = [(cls, layer) for layer in free for cls in self.classes]
        return [move for move in moves if self._saved(move) and assignment.take(*move).valid]

    def _saved(self, move: Move) -> float:
        """Return what a move saves, in units of a mean layer's keys or values."""
        cls, layer = move
        return self.cache.saved(cls.saves, layer)

    def _cost(self, assignment: Assignment, move: Move, damage: float) -> float:
        """Return the KL that a move adds, per unit that it saves."""
        self.passes += 1
        return (self.measure(assignment.take(*move)) - damage) / self._saved(move)

    def _best(self, assignment: Assignment, damage: float, costs: dict[Move, float], refused: set[Move]) -> Move | None:
        """Return the best move, whose cost was just measured; None if there is none or the passes are used up."""
        moves = [move for move in self._moves(assignment) if move not in refused]
        for move in moves:
            if move not in costs:  # not ranked: the cost of the nearest layer
                known = [other for other in costs if other[0] is move[0]]
                nearest = min(known, key=lambda other: abs(other[1] - move[1]), default=None)
                costs[move] = -math.inf if nearest is None else costs[nearest]
        fresh: set[Move] = set()
        while moves and self.passes < PASSES:
            best = min(moves, key=costs.__getitem__)
            if best in fresh or len(fresh) >= REMEASURED:
                return min(fresh, key=costs.__getitem__)
            costs[best] = self._cost(assignment, best, damage)
            fresh.add(best)
        return None

"""Which layers and methods meet a budget: a greedy search by measured damage.

A move puts a method on a further layer. At each step the search takes the move with the least measured KL to the
original, after a repair, for what it saves of the cache at a stated context (a layer with a sliding window
has less to save than others). Every move is ranked once (of deep models every n-th layer's, for its neighbours); a move
is measured again before it is taken, for as long as another looks better then (lazy greedy).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans, method_class, method_names
from crosslayer.core.plan import DepthPlan
from crosslayer.probe.shapes import LayerShape, may_share
from crosslayer.verbs.retrofit.cache import CacheShare

Kind = type[Method]
OWN = "own"  # how a record calls a layer that no method acts on
PASSES = 300  # over the search text, at most
RANKED = 200  # passes for the first ranking, at most
AGAIN = 6  # moves that are measured again for a pick, at most
Move = tuple[Kind, int]  # a method and the layer that it is to act on


def searched_methods() -> list[Kind]:
    """Return the methods that say what a layer under them saves, by name: those that a search tries."""
    kinds = [method_class(name) for name in method_names()]
    return [kind for kind in kinds if kind.saves]


@dataclass(frozen=True)
class Wires:
    """The method that acts on each layer, None where the layer keeps its own attention.

    A layer under a grouped method borrows from its leader; under any other it is changed by itself. `shapes` says which
    layers may share; None: all of them.
    """

    kinds: tuple[Kind | None, ...]
    shapes: tuple[LayerShape | None, ...] | None = None

    def leader(self, layer: int) -> int | None:
        """Return the layer that a borrower reads: the next own layer below of those that may share with it.

        Layers between them may borrow by the same method, be changed by themselves, or be of another shape.
        """
        for below in range(layer - 1, -1, -1):
            kind = self.kinds[below]
            if self._may_share(below, layer) and (kind is None or (kind.grouped and kind is not self.kinds[layer])):
                return below if kind is None else None
        return None

    def _may_share(self, layer: int, other: int) -> bool:
        return self.shapes is None or may_share(self.shapes[layer], self.shapes[other])

    @property
    def valid(self) -> bool:
        """Whether every borrower has a leader, and some layer keeps its attention."""
        keeps_attention = False
        for layer, kind in enumerate(self.kinds):
            if kind is not None and kind.grouped and self.leader(layer) is None:
                return False
            keeps_attention |= kind is None and (self.shapes is None or self.shapes[layer] is not None)
        return keeps_attention

    def take(self, kind: Kind, layer: int) -> "Wires":
        """Return the wires with a method on a further layer."""
        return Wires((*self.kinds[:layer], kind, *self.kinds[layer + 1 :]), self.shapes)

    def names(self) -> list[str]:
        """Return the method of each layer by name."""
        return [OWN if kind is None else kind.name() for kind in self.kinds]

    def methods(self) -> list[Method]:
        """Return the methods that make these wires, by name, without W_c."""
        kinds = sorted({kind for kind in self.kinds if kind is not None}, key=lambda kind: kind.name())
        return [kind.from_groups(self._groups(kind), len(self.kinds)) for kind in kinds]

    def _groups(self, kind: Kind) -> list[list[int]]:
        """Return each leader with all layers up to its last borrower that may share with it, or just the layers."""
        layers = [layer for layer, other in enumerate(self.kinds) if other is kind]
        if not kind.grouped:
            return [[layer] for layer in layers]
        last = {leader: layer for layer in layers if (leader := self.leader(layer)) is not None}
        return [
            [layer for layer in range(leader, borrower + 1) if self._may_share(layer, leader)]
            for leader, borrower in last.items()
        ]

    @property
    def plan(self) -> DepthPlan:
        """The wiring."""
        return merge_plans(self.methods(), len(self.kinds))


@dataclass
class Search:
    """A greedy search."""

    measure: Callable[[Wires], float]  # the KL to the original of wires, on the search text
    shapes: Sequence[LayerShape | None]  # of each layer's attention
    kinds: Sequence[Kind] = field(default_factory=searched_methods)  # the methods that are tried
    context: int | None = None  # tokens at which the cache is counted; None: as `CacheShare` does
    passes: int = 0  # how often something was measured
    # from the whole model on, the wires after each pick and their search damage
    curve: list[tuple[Wires, float]] = field(default_factory=list)

    def __post_init__(self):
        self.cache = CacheShare(self.shapes, self.context)

    def run(self, share: float | None = None, kl: float | None = None) -> Wires:
        """Pick moves until the cached share is at most `share`, or as long as the damage stays within `kl`."""
        assert (share is None) != (kl is None)
        if share is not None and not self.cache.least <= share < 1:
            raise ValueError(
                f"a KV budget of {share:g} cannot be met; with {len(self.shapes)} layers it lies from "
                f"{self.cache.least:.4f} to 1"
            )
        wires, damage = Wires((None,) * len(self.shapes), tuple(self.shapes)), 0.0
        self.curve = [(wires, damage)]
        moves, refused = self._moves(wires), set()
        step = math.ceil(len(moves) / RANKED)
        costs = {move: self._cost(wires, move, 0.0) for move in moves if move[1] % step == 0}
        while share is None or self.cache.of(wires.plan) > share + 1e-9:
            move = self._best(wires, damage, costs, refused)
            if move is None:
                break
            after = damage + costs.pop(move) * self._saved(move)
            if kl is not None and after > kl:
                refused.add(move)
                continue
            wires, damage = wires.take(*move), after
            self.curve.append((wires, damage))
        reached = self.cache.of(wires.plan)
        if share is not None and reached > share + 1e-9:
            raise ValueError(
                f"a KV budget of {share:g} cannot be met within {PASSES} passes; the nearest reached is {reached:.4f}"
            )
        return wires

    def _moves(self, wires: Wires) -> list[Move]:
        """Return the moves that save something and leave valid wires."""
        free = [layer for layer, shape in enumerate(self.shapes) if shape is not None and wires.kinds[layer] is None]
        moves = [(kind, layer) for layer in free for kind in self.kinds]
        return [move for move in moves if self._saved(move) and wires.take(*move).valid]

    def _saved(self, move: Move) -> float:
        """Return what a move saves, in states of a layer of mean size."""
        kind, layer = move
        return self.cache.saved(kind.saves, layer)

    def _cost(self, wires: Wires, move: Move, damage: float) -> float:
        """Return the damage that a move adds, for each state of mean size that it saves."""
        self.passes += 1
        return (self.measure(wires.take(*move)) - damage) / self._saved(move)

    def _best(self, wires: Wires, damage: float, costs: dict[Move, float], refused: set[Move]) -> Move | None:
        """Measure the most promising moves again until the best of them stands; its cost in `costs` is then fresh."""
        moves = [move for move in self._moves(wires) if move not in refused]
        for move in moves:
            if move not in costs:  # it was not ranked: as much as the nearest layer's
                known = [other for other in costs if other[0] is move[0]]
                nearest = min(known, key=lambda other: abs(other[1] - move[1]), default=None)
                costs[move] = -math.inf if nearest is None else costs[nearest]
        fresh: set[Move] = set()
        while moves and self.passes < PASSES:
            best = min(moves, key=costs.__getitem__)
            if best in fresh or len(fresh) >= AGAIN:
                return min(fresh, key=costs.__getitem__)
            costs[best] = self._cost(wires, best, damage)
            fresh.add(best)
        return None

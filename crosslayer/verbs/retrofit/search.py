"""Which layers and methods meet a budget: a greedy search by measured damage.

A move puts a method on a further layer. At each step the search takes the move with the least measured KL to the
original, after a repair (repairs.py), for what it saves of the cache at a stated context (a layer with a sliding window
has less to save than others). Every move is ranked once (of deep models every n-th layer's, for its neighbours); a move
is measured again before it is taken, for as long as another looks better then (lazy greedy).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crosslayer.probe.shapes import LayerShape
from crosslayer.verbs.retrofit.cache import CacheShare
from crosslayer.verbs.retrofit.wires import Kind, Wires, searched_methods

PASSES = 300  # over the search text, at most
RANKED = 200  # passes for the first ranking, at most
AGAIN = 6  # moves that are measured again for a pick, at most
Move = tuple[Kind, int]  # a method and the layer that it is to act on


@dataclass
class Search:
    """A greedy search.

    Attributes:
        measure: the KL to the original of wires, on the search text.
        shapes: of each layer's attention.
        kinds: the methods that are tried.
        context: tokens at which the cache is counted; None: as `CacheShare` does.
        passes: how often something was measured.
        curve: from the whole model on, the wires after each pick and their search damage.

    """

    measure: Callable[[Wires], float]
    shapes: Sequence[LayerShape | None]
    kinds: Sequence[Kind] = field(default_factory=searched_methods)
    context: int | None = None
    passes: int = 0
    curve: list[tuple[Wires, float]] = field(default_factory=list)

    def __post_init__(self):
        self.cache = CacheShare(self.shapes, self.context)

    def run(self, share: float | None = None, kl: float | None = None) -> Wires:
        """Pick moves until the cached share is at most `share`, or as long as the damage stays within `kl`.

        Raises:
            ValueError: the share cannot be reached; the message names the nearest.

        """
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
            if move not in costs:
                costs[move] = _cost_nearby(move, costs)
        fresh: set[Move] = set()
        while moves and self.passes < PASSES:
            best = min(moves, key=costs.__getitem__)
            if best in fresh or len(fresh) >= AGAIN:
                return min(fresh, key=costs.__getitem__)
            costs[best] = self._cost(wires, best, damage)
            fresh.add(best)
        return None


def _cost_nearby(move: Move, costs: dict[Move, float]) -> float:
    """Return the cost of the nearest layer's move, for a move that was not ranked."""
    kind, layer = move
    known = [other for other in costs if other[0] is kind]
    return costs[min(known, key=lambda other: abs(other[1] - layer))] if known else -math.inf

"""Greedy search by measured damage: one change after another, each the one that adds the least KL per unit it saves."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

PASSES = 300  # measurements at most
TOO_SMALL = "`kl_budget` {} is too small: every change of a single layer has a larger KL"
Configuration = TypeVar("Configuration")
Move = TypeVar("Move", bound=Hashable)


@dataclass
class GreedySearch(ABC, Generic[Configuration, Move]):
    """Takes one move after another, the one that adds the least KL per unit that it saves.

    Moves are ranked once, each alone. A move is measured again before it is taken, until no other ranks better (lazy
    greedy). When all passes are used up, a search within a KL ends; another continues by earlier measurements, and
    its curve has no point for these steps but the last.
    """

    remeasured: ClassVar[int]  # moves, at most, that are measured again per step

    measure: Callable[[Configuration], float]  # KL to the original, on the search text
    passes: int = field(default=0, init=False)  # number of measurements
    curve: list[tuple[Configuration, float]] = field(default_factory=list, init=False)  # after each step, with its KL

    @abstractmethod
    def moves(self, current: Configuration) -> list[Move]:
        """Return the moves that save something."""

    @abstractmethod
    def take(self, current: Configuration, move: Move) -> Configuration:
        """Return the configuration with one more move."""

    @abstractmethod
    def saved(self, current: Configuration, move: Move) -> float:
        """Return what a move saves."""

    @abstractmethod
    def ranked(self, start: Configuration) -> dict[Move, float]:
        """Return the KL that moves add per unit that they save, each alone; of some of them, if they are many."""

    def revise(self, costs: dict[Move, float], current: Configuration, taken: Move | None) -> None:
        """Change costs in place after a move was taken, or at the start (None); by default they stay."""

    def cost(self, current: Configuration, move: Move, damage: float) -> float:
        """Measure the KL that a move adds to `damage`, per unit that it saves."""
        self.passes += 1
        return (self.measure(self.take(current, move)) - damage) / self.saved(current, move)

    def descend(
        self, start: Configuration, is_enough: Callable[[Configuration], bool], kl: float | None = None
    ) -> Configuration:
        """Take moves from `start` until it is enough or no move is left, or as long as the KL stays within `kl`."""
        current, damage, refused = start, 0.0, set()
        self.curve = [(current, damage)]
        costs = self.ranked(start)
        self.revise(costs, current, None)
        measured = None  # how many points of the curve are measured, once others are not
        while not is_enough(current):
            move, is_measured = self._best(current, damage, costs, refused)
            if move is None or (not is_measured and kl is not None):
                break
            after = damage + costs.pop(move) * self.saved(current, move)
            if kl is not None and after > kl:
                refused.add(move)
                continue
            measured = len(self.curve) if measured is None and not is_measured else measured
            current, damage = self.take(current, move), after
            self.curve.append((current, damage))
            self.revise(costs, current, move)
        if measured is not None:
            self.passes += 1
            self.curve[measured:] = [(current, self.measure(current))]
        return current

    def _best(
        self, current: Configuration, damage: float, costs: dict[Move, float], refused: set[Move]
    ) -> tuple[Move | None, bool]:
        """Return the best move or None, and whether its cost was measured for this configuration."""
        moves, fresh = [move for move in self.moves(current) if move not in refused], set()
        while moves:
            best = min(moves, key=costs.__getitem__)
            if best in fresh:
                return best, True
            if len(fresh) == self.remeasured:
                return min(fresh, key=costs.__getitem__), True
            if self.passes >= PASSES:
                return best, False
            costs[best] = self.cost(current, best, damage)
            fresh.add(best)
        return None, False

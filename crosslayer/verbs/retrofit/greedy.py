"""Greedy search by measured damage: one change after another, each the one that adds the least KL per unit it saves.

The trade-off that a search found is then measured on text that it did not use.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from crosslayer.core.method import Method
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.report import Against
from crosslayer.judge.rows import window_rows
from crosslayer.output.formatting import ranges
from crosslayer.output.progress import Steps
from crosslayer.probe.shapes import Groups
from crosslayer.verbs.retrofit.measure import SearchObjective
from crosslayer.verbs.retrofit.result import CurvePoint, SearchRecord

POINTS = 5  # at most, of a curve: each is measured again, on all windows for the trade-off
PASSES = 300  # measurements at most, each a run over the search text
TOO_SMALL = "`kl_budget` {} is too small: every change of a single layer has a larger KL"
Configuration = TypeVar("Configuration")
Move = TypeVar("Move", bound=Hashable)


@dataclass
class GreedySearch(ABC, Generic[Configuration, Move]):
    """Takes one move after another, the one that adds the least KL per unit that it saves.

    Moves are ranked once, each alone. A move is measured again before it is taken, until no other ranks better (lazy
    greedy). When all passes are used up, a search within a KL ends; another continues by earlier measurements, and
    its curve has no point for these steps but the last.

    `bar` shows the measurements, after the `earlier` ones of other searches, of about `expected`.
    """

    # Moves, at most, that are measured again per step. Costs of single layers do not add up where a model retrieves: to
    # choose choosers by them alone (dynamic programming) came to a KL of 0.079 at half of the reads and of 0.212 at a
    # quarter, and measuring in every step to 0.063 and 0.178.
    remeasured: ClassVar[int]

    measure: Callable[[Configuration], float]  # KL to the original, on the search text
    bar: Steps = field(default_factory=Steps, kw_only=True)
    expected: int = field(default=PASSES, kw_only=True)
    earlier: int = field(default=0, kw_only=True)
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

    def kl(self, configuration: Configuration) -> float:
        """Measure a configuration, count it, and show how many there were."""
        self.passes += 1
        kl = self.measure(configuration)
        self.bar.step(min(self.earlier + self.passes, self.expected), self.expected)
        return kl

    def cost(self, current: Configuration, move: Move, damage: float) -> float:
        """Measure the KL that a move adds to `damage`, per unit that it saves."""
        return (self.kl(self.take(current, move)) - damage) / self.saved(current, move)

    def descend(
        self, start: Configuration, is_enough: Callable[[Configuration], bool], kl: float | None = None
    ) -> Configuration:
        """Take moves from `start` until it is enough or no move is left, or as long as the KL stays within `kl`."""
        current, damage = start, 0.0
        self.curve = [(current, damage)]
        costs = self.ranked(start)
        self.revise(costs, current, None)
        refused = set()
        measured_points = None  # of the curve, once others are not
        while not is_enough(current):
            move, is_measured = self._best(current, damage, costs, refused)
            # the KL of the whole is only known where each step was measured
            if move is None or (not is_measured and kl is not None):
                break
            after = damage + costs.pop(move) * self.saved(current, move)
            # too much, though the least per unit: a move that saves less may still fit
            if kl is not None and after > kl:
                refused.add(move)
                continue
            if measured_points is None and not is_measured:
                measured_points = len(self.curve)
            current, damage = self.take(current, move), after
            self.curve.append((current, damage))
            self.revise(costs, current, move)
        if measured_points is not None:
            self.curve[measured_points:] = [(current, self.kl(current))]
        return current

    def _best(
        self, current: Configuration, damage: float, costs: dict[Move, float], refused: set[Move]
    ) -> tuple[Move | None, bool]:
        """Return the best move or None, and whether its cost was measured for this configuration."""
        moves = [move for move in self.moves(current) if move not in refused]
        fresh = set()  # measured for this configuration
        # Other costs are of earlier configurations. As long as costs only rise, the move that is cheapest after it was
        # measured again would also be cheapest if all were.
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


class Step(NamedTuple):
    """A configuration of a search: its methods, the share that it takes, its KL on the search text."""

    methods: list[Method]
    share: float
    kl: float
    layers: dict[str, int]  # how many layers each method acts on


class Baseline(NamedTuple):
    """A configuration that no search was needed for: its methods, its groups of layers, the share that it takes."""

    methods: list[Method]
    groups: Groups
    share: float


def spread_steps(curve: Sequence[Any]) -> list[Any]:
    """Return at most `POINTS` steps of a curve at equal distances, with the last."""
    stride = max(1, math.ceil(len(curve) / POINTS))
    return list(curve[::-1][::stride][::-1])  # counted from the last, which must be among them


def search_record(
    objective: SearchObjective, passes: int, names: list[str], steps: Sequence[Step], baselines: Mapping[str, Baseline]
) -> SearchRecord:
    """Measure steps of a search, and each baseline against the last of them, on windows for the trade-off, if any.

    `passes` is how many configurations the search measured, `names` (L,) the method of each layer.
    """
    curve, compared = [], []
    original = objective.original
    if "trade-off" in original.windows:
        # all candidates in one run, so that the original's logits are computed once
        methods = {str(index): step.methods for index, step in enumerate(steps)}
        methods |= {name: baseline.methods for name, baseline in baselines.items()}
        candidates = [Candidate(name, objective.candidate(chosen)) for name, chosen in methods.items()]
        judge = replace(original.judge, windows=original.windows["trade-off"])
        losses = judge.kl(candidates, "measuring the trade-off on held-out text")

        for index, step in enumerate(steps):
            kl = window_rows("search", losses[str(index)], original.seed)[0].change
            assert kl is not None
            curve.append(CurvePoint(share=step.share, kl_search=step.kl, kl=kl, layers=step.layers))
        last = losses[str(len(steps) - 1)]
        for name, baseline in baselines.items():
            details = {"share": baseline.share, "groups": ", ".join(map(ranges, baseline.groups))}
            whole = window_rows(name, losses[name], original.seed)[0]  # the KL of all windows
            change = window_rows(name, losses[name], original.seed, last, Against.SEARCHED)[0]
            compared += [row.model_copy(update={"details": details}) for row in (whole, change)]
    return SearchRecord(passes=passes, methods=names, curve=curve, baselines=compared)

"""What each layer attends to, and the greedy search for it: one more layer takes a choice, its own or another's."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from crosslayer.verbs.diagnose.groups import Groups

ALL, OWN, READER = "all", "own", "reader"  # what a layer attends to: all tokens, its own choice, another layer's
Kinds = tuple[str, ...]  # by layer
Move = tuple[int, str]  # a layer, and what it attends to from now on
PASSES = 300  # at most, over the search text
REMEASURED = 4  # at most, moves that are measured again per step


def read_by(kind: str, share: float) -> float:
    """Return how many layers' keys and values a layer reads if a share of the tokens is chosen."""
    return {ALL: 1.0, OWN: (1 + share) / 2, READER: share}[kind]


def reads_of(kinds: Kinds, share: float) -> float:
    """Return the share of the original's keys and values that are read in a decoding step."""
    return sum(read_by(kind, share) for kind in kinds) / len(kinds)


def groups_of(kinds: Kinds) -> Groups:
    """Return each chooser with its readers: the layers up to the next chooser."""
    groups: Groups = []
    for layer, kind in enumerate(kinds):
        if kind == READER:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return [group for group in groups if len(group) > 1 or kinds[group[0]] == OWN]


@dataclass
class GreedySearch:
    """Lets one more layer attend to its own choice or another layer's, whichever adds the least KL per read saved.

    All moves are ranked once; a move is measured again before it is taken (lazy greedy), as long as there are passes
    left. Then a search within a budget of reads goes on by what was measured, and one within a KL ends.
    """

    measure: Callable[[Kinds], float]  # KL to the original, on the search text
    reads: Callable[[Kinds], float]  # the share of the original's keys and values that is read
    start: Kinds  # of the original
    passes: int = 0  # number of measurements
    ranking: dict[Move, float] = field(default_factory=dict)  # KL of each move alone
    curve: list[tuple[Kinds, float]] = field(default_factory=list)

    def run(self, reads: float | None = None, kl: float | None = None) -> Kinds:
        """Take moves until at most the share `reads` is read, or as long as the KL stays within `kl`."""
        kinds, damage, refused = self.start, 0.0, set()
        self.curve = [(kinds, damage)]
        self.ranking = {move: self._kl(kinds, move) for move in self._moves(kinds)}
        costs = {move: cost / self._saved(kinds, move) for move, cost in self.ranking.items()}
        while reads is None or self.reads(kinds) > reads + 1e-9:
            move = self._best(kinds, damage, costs, refused)
            if move is None or (self.passes >= PASSES and kl is not None):
                break
            after = damage + costs[move] * self._saved(kinds, move)
            if kl is not None and after > kl:
                refused.add(move)
                continue
            kinds, damage = _taken(kinds, move), after
            self.curve.append((kinds, damage))
            layer, kind = move
            if kind == OWN and layer:  # what is left to save there
                added = self.ranking[layer, READER] - self.ranking[move]
                costs[layer, READER] = added / self._saved(kinds, (layer, READER))
        if self.passes >= PASSES:  # the last costs were estimates
            self.curve[-1] = kinds, self.measure(kinds)
        return kinds

    def _moves(self, kinds: Kinds) -> list[Move]:
        moves = []
        for layer, kind in enumerate(kinds):
            if kind == ALL:
                moves.append((layer, OWN))
            if kind != READER and layer:
                moves.append((layer, READER))
        return moves

    def _saved(self, kinds: Kinds, move: Move) -> float:
        return self.reads(kinds) - self.reads(_taken(kinds, move))

    def _kl(self, kinds: Kinds, move: Move) -> float:
        self.passes += 1
        return self.measure(_taken(kinds, move))

    def _best(self, kinds: Kinds, damage: float, costs: dict[Move, float], refused: set[Move]) -> Move | None:
        """Return the best move, whose cost was just measured if any passes were left; None if there is none."""
        moves, fresh = [move for move in self._moves(kinds) if move not in refused], set()
        while moves:
            best = min(moves, key=costs.__getitem__)
            if best in fresh or self.passes >= PASSES:
                return best
            if len(fresh) == REMEASURED:
                return min(fresh, key=costs.__getitem__)
            costs[best] = (self._kl(kinds, best) - damage) / self._saved(kinds, best)
            fresh.add(best)
        return None


def _taken(kinds: Kinds, move: Move) -> Kinds:
    layer, kind = move
    return (*kinds[:layer], kind, *kinds[layer + 1 :])


def affordable(layers: int, reads: float, share: float) -> int:
    """Return how many choosers may attend to all tokens within a budget of reads, if all other layers are readers."""
    return max(1, math.floor(layers * (reads - share) / (1 - share) + 1e-9))


def evenly(layers: int, count: int, kind: str = ALL) -> Kinds:
    """Return so many choosers at equal distances, all of the same kind."""
    firsts = {round(number * layers / count) for number in range(count)}
    return tuple(kind if layer in firsts else READER for layer in range(layers))

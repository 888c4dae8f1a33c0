"""What each layer attends to, all tokens or chosen ones, and the greedy search for it."""

import math
from dataclasses import dataclass, field

from crosslayer.probe.shapes import Groups
from crosslayer.verbs.retrofit.greedy import GreedySearch

ALL, OWN, READER = "all", "own", "reader"  # what a layer attends to: all tokens, its own choice, another layer's
Kinds = tuple[str, ...]  # by layer
Move = tuple[int, str]  # a layer, and what it attends to from now on


def reads_of(kinds: Kinds, share: float) -> float:
    """Return the share of the original's keys and values that a decoding step reads if a share of tokens is chosen."""
    read_by = {ALL: 1.0, OWN: (1 + share) / 2, READER: share}
    return sum(read_by[kind] for kind in kinds) / len(kinds)


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
class KindSearch(GreedySearch[Kinds, Move]):
    """A search for what layers attend to, whose moves let one more layer attend to its own or another's choice."""

    remeasured = 4

    layers: int
    share: float  # of the tokens, that are chosen
    ranking: dict[Move, float] = field(default_factory=dict, init=False)  # KL of each move alone

    def run(self, reads: float | None = None, kl: float | None = None) -> Kinds:
        """Take moves until at most the share `reads` is read, or as long as the KL stays within `kl`."""
        most = -math.inf if reads is None else reads + 1e-9
        return self.descend((ALL,) * self.layers, lambda kinds: self.reads(kinds) <= most, kl)

    def reads(self, kinds: Kinds) -> float:
        """Return the share of the original's keys and values that is read."""
        return reads_of(kinds, self.share)

    def moves(self, current: Kinds) -> list[Move]:
        """Return each layer with what else it may attend to."""
        moves = []
        for layer, kind in enumerate(current):
            if kind == ALL:
                moves.append((layer, OWN))
            if kind != READER and layer:
                moves.append((layer, READER))
        return moves

    def take(self, current: Kinds, move: Move) -> Kinds:
        """Return the kinds with another one for a layer."""
        layer, kind = move
        return (*current[:layer], kind, *current[layer + 1 :])

    def saved(self, current: Kinds, move: Move) -> float:
        """Return the share of the reads that a move saves."""
        return self.reads(current) - self.reads(self.take(current, move))

    def ranked(self, start: Kinds) -> dict[Move, float]:
        """Return the cost of each move alone."""
        costs = {move: self.cost(start, move, 0.0) for move in self.moves(start)}
        self.ranking = {move: cost * self.saved(start, move) for move, cost in costs.items()}
        return costs

    def revise(self, costs: dict[Move, float], current: Kinds, taken: Move | None) -> None:
        """Give a layer that now attends to its own choice what it has left to lose by another's, of both alone."""
        if taken is not None and taken[1] == OWN and taken[0]:
            reader = (taken[0], READER)
            costs[reader] = (self.ranking[reader] - self.ranking[taken]) / self.saved(current, reader)


def fewest_reads(layers: int) -> Kinds:
    """Return the kinds that read least: the first layer's own choice for all."""
    return (OWN, *([READER] * (layers - 1)))


def affordable(layers: int, reads: float, share: float) -> int:
    """Return how many choosers may attend to all tokens within a budget of reads, if all other layers are readers."""
    return max(1, math.floor(layers * (reads - share) / (1 - share) + 1e-9))


def evenly(layers: int, count: int) -> Kinds:
    """Return `count` choosers at equal distances, which attend to all tokens."""
    firsts = {round(number * layers / count) for number in range(count)}
    return tuple(ALL if layer in firsts else READER for layer in range(layers))

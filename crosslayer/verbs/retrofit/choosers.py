"""Choose which layers choose tokens for which others, by measured damage, within a budget of reads or of KL.

A greedy search: one more layer attends to its own or another layer's choice, the one that adds the least measured KL
per read that it saves. Each key-value head of a reader takes the choice of the chooser's head that recovers most of its
attention. Where the number of chosen tokens is free, the search is repeated with twice as many and, unless that is
better, with half as many.

Shapes: L layers, H key-value heads, N sequences, T tokens.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from crosslayer.core.choice import ChoiceMethod, TokenChoice
from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.output.progress import Steps, progress
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.maps import choice_sums
from crosslayer.probe.model import no_cache
from crosslayer.probe.shapes import Groups
from crosslayer.verbs.retrofit.cache import CONTEXT
from crosslayer.verbs.retrofit.greedy import (
    PASSES,
    TOO_SMALL,
    Baseline,
    GreedySearch,
    Step,
    search_record,
    spread_steps,
)
from crosslayer.verbs.retrofit.measure import SearchObjective
from crosslayer.verbs.retrofit.options import RetrofitOptions
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.search import UNCHANGED, searched_methods
from crosslayer.verbs.retrofit.strategy import Chosen, Named, Strategy

ALL, OWN, READER = "all", "own", "reader"  # what a layer attends to: all tokens, its own choice, another layer's
Kinds = tuple[str, ...]  # by layer
Move = tuple[int, str]  # a layer, and its new role
# Of a budget of reads: how many tokens are chosen, in the order in which they are tried. The third is only tried if the
# second is not better than the first, since each is a search of its own.
SHARES = (0.25, 0.5, 0.125)


def reads_of(kinds: Kinds, share: float) -> float:
    """Return the share of the original's keys and values that a decoding step reads if a share of tokens is chosen."""
    # to choose for itself, a layer reads all keys, but only the values of what it chose
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
    # a layer that attends to all tokens and that nobody reads is no chooser
    return [group for group in groups if len(group) > 1 or kinds[group[0]] == OWN]


@dataclasses.dataclass
class KindSearch(GreedySearch[Kinds, Move]):
    """A search for what layers attend to, whose moves let one more layer attend to its own or another's choice."""

    remeasured = 4

    layers: int
    share: float  # of the tokens, that are chosen
    ranking: dict[Move, float] = dataclasses.field(default_factory=dict, init=False)  # KL of each move alone

    def run(self, reads: float | None = None, kl: float | None = None) -> Kinds:
        """Take moves until at most the share `reads` is read, or as long as the KL stays within `kl`."""
        most = -math.inf if reads is None else reads + 1e-9
        return self.descend((ALL,) * self.layers, lambda kinds: reads_of(kinds, self.share) <= most, kl)

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
        return reads_of(current, self.share) - reads_of(self.take(current, move), self.share)

    def ranked(self, start: Kinds) -> dict[Move, float]:
        """Return the cost of each move alone."""
        costs = {move: self.cost(start, move, 0.0) for move in self.moves(start)}
        self.ranking = {move: cost * self.saved(start, move) for move, cost in costs.items()}
        return costs

    def revise(self, costs: dict[Move, float], current: Kinds, taken: Move | None) -> None:
        """Update the cost of reading another layer's choice, for a layer that now has its own: the damage this adds."""
        # the first layer has nobody to read from
        if taken is not None and taken[1] == OWN and taken[0]:
            reader = (taken[0], READER)
            # ranked alone, each against a layer that attends to all: the layer has paid for its own choice already
            costs[reader] = (self.ranking[reader] - self.ranking[taken]) / self.saved(current, reader)


def affordable(layers: int, reads: float, share: float) -> int:
    """Return how many choosers may attend to all tokens within a budget of reads, if all other layers are readers."""
    return max(1, math.floor(layers * (reads - share) / (1 - share) + 1e-9))


def evenly(layers: int, count: int) -> Kinds:
    """Return `count` choosers at equal distances, which attend to all tokens."""
    firsts = {round(index * layers / count) for index in range(count)}
    return tuple(ALL if layer in firsts else READER for layer in range(layers))


def matched_heads(recovered: Tensor, groups: Groups) -> tuple[tuple[int, ...], ...]:
    """Return, for each layer, the chooser's heads that recover most of its heads' attention; () for no reader.

    `recovered` is (L, H, L, H), chooser first; each group names its chooser first.
    """
    heads: list[tuple[int, ...]] = [()] * len(recovered)
    for chooser, *readers in groups:
        for reader in readers:
            heads[reader] = tuple(recovered[chooser, :, reader].argmax(0).tolist())
    return tuple(heads)


class Choosers(Strategy):
    """A budget of reads or of KL chooses who chooses tokens for whom, by measured damage."""

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        (entry,) = named or searched_methods("choosers")
        method = entry() if isinstance(entry, type) else entry
        assert isinstance(method, ChoiceMethod)
        self.method = method
        for name in ("groups", "sparse_choosers", "chooser_heads"):
            if vars(self.method)[name]:
                raise ValueError(f"a budget chooses {name}, but `method` sets it; remove one of them")
        self.counts_are_free = isinstance(entry, type)  # a budget of reads chooses how many tokens, too
        self.needs = ("search",) if options.quick else ("search", "trade-off")
        super().__init__(options, [self.method], config)

    @torch.no_grad()
    def choose(self, original: Original) -> Chosen:
        """Return the method that meets the budget, and the course of the search.

        The result is compared with choosers at equal distances.
        """
        options, layers = self.options, original.model.config.num_hidden_layers
        context = options.kv_context or CONTEXT
        # the search lets any layer read from any below it, so all of them must be able to share
        original.sublayers.check(dataclasses.replace(self.method, groups=(tuple(range(layers)),)).plan(layers))
        candidates = self._candidates(original.windows["search"].ids.shape[1], layers, context)
        with progress("running the original", 0):
            objective = SearchObjective(original)

        searches: list[ChoiceSearch] = []
        with progress("searching who chooses", PASSES) as bar:
            for candidate in candidates:
                earlier = sum(search.passes for search in searches)
                searches.append(ChoiceSearch(objective, candidate, context, bar, earlier))
                searches[-1].run(options.read_budget, options.kl_budget)
                # twice as many tokens did less damage, so half as many are not tried
                if searches[-1].curve[-1][1] < searches[0].curve[-1][1]:
                    break

        best = min(searches, key=lambda search: search.curve[-1][1])
        kinds = best.curve[-1][0]
        if kinds == (ALL,) * layers:
            raise ValueError(TOO_SMALL.format(options.kl_budget))
        names = [UNCHANGED if kind == ALL else self.method.name() for kind in kinds]
        passes = sum(search.passes for search in searches)
        record = search_record(objective, passes, names, *best.compared())
        chosen = best.method(kinds)
        return Chosen([chosen], Choice(how="search", groups=[list(group) for group in chosen.groups], search=record))

    def _candidates(self, length: int, layers: int, context: int) -> list[ChoiceMethod]:
        """Return the methods to search with: several numbers of tokens, where they are free.

        Each leaves some tokens out, chooses some that are not always chosen, and can meet a budget of reads.
        """
        method, reads = self.method, self.options.read_budget
        candidates = [method]
        if self.counts_are_free and reads is not None:
            shared = [dataclasses.replace(method, tokens=share * reads, least=0) for share in SHARES]
            # Short texts get as many tokens as the windows: a share of their own few cost 20 points of SciQ and 28 of
            # LAMBADA, whose questions have about 100 tokens.
            candidates = [dataclasses.replace(candidate, least=candidate.count.of(length)) for candidate in shared]

        # where windows are so short that every token is chosen, there is no damage to see
        min(candidates, key=lambda candidate: candidate.tokens).check_text(length)
        candidates = [candidate for candidate in candidates if candidate.count.of(length) < length]
        always = method.sinks + method.window
        fitting = []
        for candidate in candidates:
            tokens = candidate.tokens * context if candidate.tokens < 1 else candidate.tokens
            if always < tokens < context:
                fitting.append(candidate)
        if not fitting:
            raise ValueError(
                f"tokens must be more than the {always} that are always chosen, and fewer than the `kv_context` of "
                f"{context}, got {candidates[0].tokens:g}; change them, or `read_budget`"
            )
        if reads is None:
            return fitting
        # the least is read where the first layer chooses for all
        all_read_first = (OWN, *[READER] * (layers - 1))
        least = [reads_of(all_read_first, candidate.count.share(context)) for candidate in fitting]
        if reads < min(least):
            raise ValueError(f"`read_budget` must be at least {min(least):.4f} here, got {reads:g}")
        return [candidate for candidate, share in zip(fitting, least, strict=True) if share <= reads]


class ChoiceSearch(KindSearch):
    """The search with one candidate: a method with a number of chosen tokens and without groups.

    Reads are counted in a context.
    """

    def __init__(self, objective: SearchObjective, candidate: ChoiceMethod, context: int, bar: Steps, earlier: int):
        """Measure what each layer's choice recovers of the others' attention on the search text."""
        model = objective.original.model
        choice = TokenChoice(candidate.count, candidate.sinks, candidate.window)
        sums = []
        for sequence in objective.ids:
            calls: list[AttentionCall] = []
            with visited(model, calls.append):
                model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model))
            sums.append(choice_sums(sorted(calls, key=lambda call: call.layer), choice))
        rows = sum(of_sequence.rows for of_sequence in sums)
        # share of a reader's attention on the tokens that a chooser would choose, (L, H, L, H), chooser first
        self.recovered = torch.stack([of_sequence.recovered for of_sequence in sums]).sum(0).cpu() / rows
        self.candidate = candidate
        layers, share = model.config.num_hidden_layers, candidate.count.share(context)
        super().__init__(lambda kinds: objective.kl([self.method(kinds)]), layers, share, bar=bar, earlier=earlier)

    def method(self, kinds: Kinds) -> ChoiceMethod:
        """Return the method for what layers attend to, with the best-matching heads."""
        groups = groups_of(kinds)
        return dataclasses.replace(
            self.candidate,
            groups=tuple(map(tuple, groups)),
            sparse_choosers=tuple(layer for layer, kind in enumerate(kinds) if kind == OWN),
            chooser_heads=matched_heads(self.recovered, groups),
        )

    def compared(self) -> tuple[list[Step], dict[str, Baseline]]:
        """Return steps of the search, and choosers at equal distances if they are others than the best wiring's."""
        name = self.candidate.name()
        steps = []
        for kinds, kl in spread_steps(self.curve[1:]):
            layers = {name: sum(kind != ALL for kind in kinds)}
            steps.append(Step([self.method(kinds)], reads_of(kinds, self.share), kl, layers))
        # as many choosers as the reads of the last step pay for
        even = evenly(self.layers, affordable(self.layers, steps[-1].share, self.share))
        if even == self.curve[-1][0]:
            return steps, {}
        method = self.method(even)
        groups = [list(group) for group in method.groups]
        return steps, {name: Baseline([method], groups, reads_of(even, self.share))}

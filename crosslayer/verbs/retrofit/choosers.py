"""Choose which layers choose tokens for which others, by measured damage, within a budget of reads or of KL.

Two searches on the same text; the better result is taken:

- a greedy one: one more layer attends to its own or another layer's choice, the one that adds the least measured KL;
- dynamic programming: groups of neighbours with the least sum, over readers, of the attention that a reader loses (its
  own attention to tokens that its chooser does not choose) times what a unit of it costs, the KL with it alone.

In both, each key-value head of a reader takes the choice of the chooser's head that recovers most of its attention.

Shapes: L layers, H key-value heads, N sequences, T tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.core.choice import ChoiceMethod, TokenChoice
from crosslayer.core.method import Method
from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import progress
from crosslayer.probe.choices import choice_sums
from crosslayer.probe.intercept import AttentionCall, final_hidden, visited
from crosslayer.probe.what_if import find_sublayers
from crosslayer.verbs.retrofit.cache import CONTEXT
from crosslayer.verbs.retrofit.greedy import PASSES, TOO_SMALL
from crosslayer.verbs.retrofit.kinds import (
    ALL,
    OWN,
    READER,
    Kinds,
    KindSearch,
    Move,
    affordable,
    evenly,
    fewest_reads,
    groups_of,
    read_by,
    reads_of,
)
from crosslayer.verbs.retrofit.request import Request
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.search import UNCHANGED
from crosslayer.verbs.retrofit.trade_off import Baseline, Measure, Step, search_record, spread_steps

SHARES = (0.5, 0.25, 0.125)  # of a budget of reads: how many tokens are chosen
TINY = 1e-9  # share of attention


@dataclass(frozen=True)
class Recovered:
    """Which share of a reader's attention falls on the tokens that a chooser would choose, (L, H, L, H)."""

    by_head: Tensor

    def lost(self) -> Tensor:
        """Return the attention that each reader loses with each chooser, (L, L), chooser first; the best heads."""
        return 1 - self.by_head.amax(1).mean(-1)

    def matched(self, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return, for each layer, the chooser's heads that recover most of its heads' attention; () for no reader."""
        heads: list[tuple[int, ...]] = [()] * len(self.by_head)
        for chooser, *readers in groups:
            for reader in readers:
                heads[reader] = tuple(self.by_head[chooser, :, reader].argmax(0).tolist())
        return tuple(heads)


@torch.no_grad()
def measure_recovered(model: PreTrainedModel, ids: Tensor, choice: TokenChoice) -> Recovered:
    """Measure the attention recovered on token ids (N, T)."""
    sums = []
    for sequence in ids:
        calls: list[AttentionCall] = []
        with visited(model, calls.append):
            final_hidden(model, sequence)
        sums.append(choice_sums(sorted(calls, key=lambda call: call.layer), choice))
    rows = sum(one.rows for one in sums)
    return Recovered(torch.stack([one.recovered for one in sums]).sum(0).cpu() / rows)


def programmed(own: Sequence[float], readers: Tensor, reads: float, share: float) -> Kinds | None:
    """Return what each layer attends to, of the least total cost within a budget of reads; None if it is too small.

    Args:
        own: (L,), the cost of a layer that attends to its own choice.
        readers: (L, L), the cost of a reader with a chooser, chooser first; a chooser is the nearest below.
        reads: the share of the original's keys and values that may be read.
        share: of the tokens, that are chosen.

    """
    layers = len(own)
    within = [[0.0] * (layers + 1) for _ in range(layers)]  # cost of the readers, by chooser and next chooser
    for first in range(layers):
        for stop in range(first + 2, layers + 1):
            within[first][stop] = within[first][stop - 1] + float(readers[first, stop - 1])
    # by (layers that attend to all, to their own choice): the least cost, and (first layer, kind) of each chooser
    best: list[dict[tuple[int, int], tuple[float, list[Move]]]] = [{(0, 0): (0.0, [])}]
    for stop in range(1, layers + 1):
        options: dict[tuple[int, int], tuple[float, list[Move]]] = {}
        for first in range(stop):
            for (whole, chosen), (cost, choosers) in best[first].items():
                for kind, key, added in ((ALL, (whole + 1, chosen), 0.0), (OWN, (whole, chosen + 1), own[first])):
                    read = key[0] + key[1] * read_by(OWN, share) + (layers - sum(key)) * share
                    total = cost + added + within[first][stop]
                    if read <= reads * layers + 1e-9 and (key not in options or total < options[key][0]):
                        options[key] = total, [*choosers, (first, kind)]
        best.append(options)
    if not best[-1]:
        return None
    kinds = [READER] * layers
    for layer, kind in min(best[-1].values())[1]:
        kinds[layer] = kind
    return tuple(kinds)


@torch.no_grad()
def choosers_by_damage(
    model: PreTrainedModel, windows: Mapping[str, Windows], request: Request
) -> tuple[list[Method], Choice]:
    """Return the method that meets the request's budget of reads or of KL, and the record of the choice.

    `windows` is text by purpose: "search" to measure wirings, "trade-off" to compare the result with choosers at equal
    distances.
    """
    options, method, layers = request.options, request.method, model.config.num_hidden_layers
    assert isinstance(method, ChoiceMethod)
    length, context = windows["search"].ids.shape[1], options.kv_context or CONTEXT
    find_sublayers(model).check(dataclasses.replace(method, groups=(tuple(range(layers)),)).plan(layers))
    candidates = [method]
    if request.searches_tokens and options.read_budget is not None:
        candidates = [_with_share(method, share * options.read_budget, length) for share in SHARES]
    candidates = _usable(candidates, length, context)
    least = [reads_of(fewest_reads(layers), candidate.count.share(context)) for candidate in candidates]
    check_reachable(options.read_budget, min(least))
    with progress("running the original", 0):
        search = ChoiceSearch(Measure(model, windows["search"], request), context)
    with progress("searching who chooses", PASSES) as bar:
        search.measure.step = lambda: bar.step(min(search.passes, PASSES), PASSES)
        best = search.run(candidates, options.read_budget, options.kl_budget)
    if best.kinds == (ALL,) * layers:
        raise ValueError(TOO_SMALL.format(options.kl_budget))
    steps, baselines = search.compared(best)
    names = [UNCHANGED if kind == ALL else method.name() for kind in best.kinds]
    record = search_record(search.measure, search.passes, names, steps, baselines, windows.get("trade-off"))
    chosen = search.method(best.kinds, best.candidate)
    return [chosen], Choice(how="search", groups=[list(group) for group in chosen.groups], search=record)


def check_some_are_left_out(method: ChoiceMethod, length: int) -> None:
    """Raise if windows are so short that all of their tokens are chosen, which would do no damage there."""
    if method.count.of(length) == length:
        raise ValueError(
            f"all tokens of windows of `length` {length} are chosen, where {method.tokens:g} are; give longer windows"
        )


def check_reachable(budget: float | None, least: float) -> None:
    """Raise if a budget of reads is below the least that any wiring reads."""
    if budget is not None and budget < least:
        raise ValueError(f"`read_budget` {budget:g} cannot be reached; the least is {least:.4f}")


def _with_share(method: ChoiceMethod, share: float, length: int) -> ChoiceMethod:
    """Return the method with a share of the tokens, but in shorter texts than windows as many tokens as in these."""
    method = dataclasses.replace(method, tokens=share, least=0)
    return dataclasses.replace(method, least=method.count.of(length))


def _usable(candidates: Sequence[ChoiceMethod], length: int, context: int) -> list[ChoiceMethod]:
    """Return the methods that leave some tokens out, and choose some beside those that are always chosen.

    Raises:
        ValueError: there are none.

    """
    check_some_are_left_out(min(candidates, key=lambda method: method.tokens), length)
    some = [method for method in candidates if method.count.of(length) < length]
    fitting = []
    for method in some:
        tokens = method.tokens * context if method.tokens < 1 else method.tokens
        if method.sinks + method.window < tokens < context:
            fitting.append(method)
    if not fitting:
        raise ValueError(
            f"tokens must be more than the {some[0].sinks + some[0].window} that are always chosen, and fewer than the "
            f"`kv_context` of {context}, got {some[0].tokens:g}; change them, or `read_budget`"
        )
    return fitting


class MeasuredKinds(NamedTuple):
    """What each layer attends to, with which candidate, and the KL on the search text."""

    kinds: Kinds
    candidate: ChoiceMethod
    kl: float


class ChoiceSearch:
    """Both searches, for candidates: the method with several numbers of chosen tokens, and without groups.

    Reads are counted in a context.
    """

    def __init__(self, measure: Measure, context: int):
        self.measure, self.context = measure, context
        self.layers = measure.model.config.num_hidden_layers
        self.passes = 0  # wirings that were measured
        self.recovered: dict[ChoiceMethod, Recovered] = {}  # by candidate
        self.greedy: dict[ChoiceMethod, KindSearch] = {}  # by candidate

    def attention_recovered(self, candidate: ChoiceMethod) -> Recovered:
        """Return the attention that is recovered with so many tokens, measured on the search text."""
        if candidate not in self.recovered:
            choice = TokenChoice(candidate.count, candidate.sinks, candidate.window)
            self.recovered[candidate] = measure_recovered(self.measure.model, self.measure.ids, choice)
        return self.recovered[candidate]

    def method(self, kinds: Kinds, candidate: ChoiceMethod) -> ChoiceMethod:
        """Return the method for what layers attend to, with the best-matching heads."""
        groups = groups_of(kinds)
        return dataclasses.replace(
            candidate,
            groups=tuple(map(tuple, groups)),
            sparse_choosers=tuple(layer for layer, kind in enumerate(kinds) if kind == OWN),
            chooser_heads=self.attention_recovered(candidate).matched(groups),
        )

    def kl(self, kinds: Kinds, candidate: ChoiceMethod) -> float:
        """Return the KL to the original on the search text."""
        self.passes += 1
        return self.measure.kl([self.method(kinds, candidate)])

    def reads(self, kinds: Kinds, candidate: ChoiceMethod) -> float:
        """Return the share of the original's keys and values that a decoding step reads."""
        return reads_of(kinds, candidate.count.share(self.context))

    def run(self, candidates: Sequence[ChoiceMethod], reads: float | None, kl: float | None) -> MeasuredKinds:
        """Return the wiring with the least KL within the share `reads`, or with the fewest reads within `kl`.

        The greedy search runs with the middle candidate, and with another if dynamic programming is best there.
        """
        first = self._greedily(candidates[len(candidates) // 2], reads, kl)
        budget = self.reads(first.kinds, first.candidate) if reads is None else reads
        wirings = [first]
        for candidate in candidates:
            kinds = self._programmed(candidate, budget, first.candidate)
            if kinds is not None:
                wirings.append(MeasuredKinds(kinds, candidate, self.kl(kinds, candidate)))
        best = self._best(wirings, reads)
        if best.candidate not in self.greedy:
            best = self._best([best, self._greedily(best.candidate, reads, kl)], reads)
        return best

    def compared(self, best: MeasuredKinds) -> tuple[list[Step], dict[str, Baseline]]:
        """Return steps of the greedy search to the best wiring, and choosers at equal distances if they are others."""
        candidate, name = best.candidate, best.candidate.name()
        taken = spread_steps(self.greedy[candidate].curve[1:])
        if not taken or taken[-1][0] != best.kinds:
            taken.append((best.kinds, best.kl))
        steps = []
        for kinds, kl in taken:
            layers = {name: sum(kind != ALL for kind in kinds)}
            steps.append(Step([self.method(kinds, candidate)], self.reads(kinds, candidate), kl, layers))
        reads, share = self.reads(best.kinds, candidate), candidate.count.share(self.context)
        even = evenly(self.layers, affordable(self.layers, reads, share))
        if even == best.kinds:
            return steps, {}
        method = self.method(even, candidate)
        return steps, {name: Baseline([method], [list(group) for group in method.groups], self.reads(even, candidate))}

    def _best(self, wirings: Sequence[MeasuredKinds], reads: float | None) -> MeasuredKinds:
        """Return the wiring with the least KL that meets the budget; the greedy search may have used up its moves."""
        shares = [self.reads(wiring.kinds, wiring.candidate) for wiring in wirings]
        meeting = [one for one, share in zip(wirings, shares, strict=True) if reads is None or share <= reads + 1e-9]
        return min(meeting, key=lambda wiring: wiring.kl)

    def _greedily(self, candidate: ChoiceMethod, reads: float | None, kl: float | None) -> MeasuredKinds:
        search = KindSearch(
            lambda kinds: self.kl(kinds, candidate), lambda kinds: self.reads(kinds, candidate), (ALL,) * self.layers
        )
        self.greedy[candidate] = search
        search.run(reads, kl)
        kinds, damage = search.curve[-1]
        return MeasuredKinds(kinds, candidate, damage)

    def _programmed(self, candidate: ChoiceMethod, reads: float, ranked: ChoiceMethod) -> Kinds | None:
        """Return the wiring of dynamic programming; costs are those that were measured alone with `ranked`."""
        ranking = self.greedy[ranked].ranking
        before, after = (self.attention_recovered(each).lost() for each in (ranked, candidate))  # (L, L)
        below = [max(layer - 1, 0) for layer in range(self.layers)]
        own = [ranking[layer, OWN] * _ratio(after[layer, layer], before[layer, layer]) for layer in range(self.layers)]
        unit = [0.0] + [ranking[i, READER] / max(float(before[below[i], i]), TINY) for i in range(1, self.layers)]
        return programmed(own, after * torch.tensor(unit), reads, candidate.count.share(self.context))


def _ratio(after: Tensor, before: Tensor) -> float:
    return float(after) / max(float(before), TINY)

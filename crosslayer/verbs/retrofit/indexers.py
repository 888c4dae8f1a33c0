"""Choose which layers of a model with indexers share another layer's choice, within a budget of reads or of KL.

The greedy search of kinds.py, where every layer attends to chosen tokens already: one more layer takes the choice of
the nearest layer below that has an indexer, instead of its own. Each wiring is tried in the original, and reads count
the keys of indexers.

Shapes: N windows, T tokens, C hidden, V vocabulary, L layers.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.core.choice import ChoiceMethod
from crosslayer.core.method import Method
from crosslayer.core.sixteen_bits import DTYPE
from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import progress
from crosslayer.probe.indexers import FULL, SHARED, chosen_tokens, with_tokens_of_indexers
from crosslayer.probe.intercept import final_hidden
from crosslayer.probe.what_if import find_sublayers, what_if
from crosslayer.verbs.diagnose.groups import Groups
from crosslayer.verbs.retrofit.choosers import check_reachable, check_some_are_left_out
from crosslayer.verbs.retrofit.damage import Run, logits_of
from crosslayer.verbs.retrofit.greedy import PASSES, TOO_SMALL
from crosslayer.verbs.retrofit.kinds import OWN, READER, Kinds, KindSearch, evenly, groups_of
from crosslayer.verbs.retrofit.request import Request
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.search import UNCHANGED
from crosslayer.verbs.retrofit.trade_off import Baseline, KlMeasure, Step, search_record, spread_steps
from crosslayer.wiring.read import read_plan

CONTEXT_PER_CHOSEN = 16  # the default context at which reads are counted, by how many tokens are chosen


class WhatIfMeasure(KlMeasure):
    """KL of wirings that are tried in the original; of it, only the last hidden states (T, C) of windows are kept."""

    def __init__(self, model: PreTrainedModel, windows: Windows):
        super().__init__(model, windows)
        self.sublayers = find_sublayers(model)
        self.hidden = [final_hidden(model, ids) for ids in self.ids]

    def run(self, methods: list[Method]) -> Run:
        """Return a function from ids (B, T) to the logits (B, T, V) of the model with these methods."""
        run = logits_of(self.model)

        def wired(ids: Tensor) -> Tensor:
            with what_if(self.model, methods, self.sublayers):
                return run(ids)

        return wired

    def logits(self, methods: list[Method]) -> Iterable[tuple[Tensor, Tensor]]:
        """Return log-probabilities of the original and logits of the wired model, (T, V) each, by window."""
        head: Any = self.model.get_output_embeddings()
        for ids, hidden in zip(self.ids, self.hidden, strict=True):
            with what_if(self.model, methods, self.sublayers):
                after = final_hidden(self.model, ids)
            yield head(hidden).float().log_softmax(-1), head(after)


def default_context(config: PreTrainedConfig) -> int:
    """Return the tokens at which reads are counted unless the user says otherwise."""
    return CONTEXT_PER_CHOSEN * chosen_tokens(config)


class IndexedLayers:
    """The layers with indexers, and what a wiring of them means for the model: its method, and what it reads."""

    def __init__(self, config: PreTrainedConfig, method: ChoiceMethod, context: int | None):
        text: Any = config.get_text_config()
        self.config = config
        self.method, self.context = with_tokens_of_indexers(method, config), context or default_context(config)
        self.numbers = [i for i, chooser in enumerate(read_plan(config).plan.choices) if chooser is not None]
        if self.numbers != list(range(self.numbers[0], self.numbers[-1] + 1)):
            raise ValueError(f"{text.model_type} has other attention between its layers with indexers")
        self.start: Kinds = tuple(READER if text.indexer_types[number] == SHARED else OWN for number in self.numbers)
        self.original_bytes = self._read_bytes(self.start)

    def evenly(self, count: int) -> Kinds:
        """Return so many choosers at equal distances among the layers that have an indexer in the original."""
        choosers = [i for i, kind in enumerate(self.start) if kind == OWN]
        kept = {choosers[i] for i, kind in enumerate(evenly(len(choosers), count, OWN)) if kind == OWN}
        return tuple(OWN if i in kept else READER for i in range(len(self.start)))

    def groups(self, kinds: Kinds) -> Groups:
        """Return the layers that attend to the same choice, the chooser first; none that are alone."""
        groups = [[self.numbers[i] for i in group] for group in groups_of(kinds)]
        return [group for group in groups if len(group) > 1]

    def methods(self, kinds: Kinds) -> list[Method]:
        """Return the method of a wiring in which some layer shares an indexer."""
        return [dataclasses.replace(self.method, groups=tuple(map(tuple, self.groups(kinds))))]

    def reads(self, kinds: Kinds) -> float:
        """Return the share of the bytes that the original reads in a decoding step."""
        return self._read_bytes(kinds) / self.original_bytes

    def _read_bytes(self, kinds: Kinds) -> int:
        changed = copy.deepcopy(self.config)
        text: Any = changed.get_text_config()
        for number, kind in zip(self.numbers, kinds, strict=True):
            text.indexer_types[number] = SHARED if kind == READER else FULL
        return read_plan(changed, dtype=DTYPE).read_at(self.context)


@torch.no_grad()
def indexers_by_damage(
    model: PreTrainedModel, windows: Mapping[str, Windows], request: Request
) -> tuple[list[Method], Choice]:
    """Return the method that meets the request's budget of reads or of KL, and the record of the choice.

    `windows` is text by purpose: "search" to measure wirings, "trade-off" to compare the result with choosers at equal
    distances.
    """
    options, length = request.options, windows["search"].ids.shape[1]
    assert isinstance(request.method, ChoiceMethod)
    layers = IndexedLayers(model.config, request.method, options.kv_context)
    check_some_are_left_out(layers.method, length)
    fewest = (layers.start[0], *([READER] * (len(layers.start) - 1)))
    if layers.start == fewest:
        raise ValueError("all layers share the indexer of the first already")
    check_reachable(options.read_budget, layers.reads(fewest))
    with progress("running the original", 0):
        measure = WhatIfMeasure(model, windows["search"])
    search = KindSearch(lambda kinds: measure.kl(layers.methods(kinds)), layers.reads, layers.start)
    with progress("searching who chooses", PASSES) as bar:
        measure.step = lambda: bar.step(min(search.passes, PASSES), PASSES)
        kinds = search.run(options.read_budget, options.kl_budget)
    if kinds == layers.start:
        raise ValueError(TOO_SMALL.format(options.kl_budget))
    names = [UNCHANGED] * model.config.get_text_config().num_hidden_layers
    for number, kind, before in zip(layers.numbers, kinds, layers.start, strict=True):
        names[number] = layers.method.name() if kind != before else UNCHANGED
    steps, baselines = _compared(layers, search)
    record = search_record(measure, search.passes, names, steps, baselines, windows.get("trade-off"))
    return layers.methods(kinds), Choice(how="search", groups=layers.groups(kinds), search=record)


def _compared(layers: IndexedLayers, search: KindSearch) -> tuple[list[Step], dict[str, Baseline]]:
    """Return steps of the search, and as many choosers at equal distances if they are others."""
    name = layers.method.name()
    steps = [
        Step(layers.methods(kinds), layers.reads(kinds), kl, {name: kinds.count(READER)})
        for kinds, kl in spread_steps(search.curve[1:])
    ]
    even, baselines = layers.evenly(search.curve[-1][0].count(OWN)), {}
    if even != search.curve[-1][0]:
        baselines[name] = Baseline(layers.methods(even), layers.groups(even), layers.reads(even))
    return steps, baselines

"""The windows that models are measured on: those of the reports, and none that anything was fitted to.

A report cuts each domain into a list of windows that follows from length, seed and `bos` alone: first those that
evaluator, then those that W_c and the choice of layers are fitted to. Here the same list is cut again, and windows are
taken from its beginning, but for those that any of the retrofits was fitted to. Of a domain that is trained on,
windows come from what is held out of it, whose pieces may hold text that was fitted to.

Shapes: N windows, T tokens of a window.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.domains import EMBEDDED, embedded_domains, joined, shared_out
from crosslayer.corpus.windows import Windows, split
from crosslayer.verbs.heal.recipe import HealRecipe, embedded_source
from crosslayer.verbs.heal.retrofits import Retrofit
from crosslayer.verbs.retrofit.damage import MIN_WINDOWS
from crosslayer.verbs.retrofit.request import Request
from crosslayer.verbs.retrofit.texts import Texts


@dataclass(frozen=True)
class EvaluationWindows:
    """How the windows to measure on are cut."""

    counts: Mapping[str, int]  # N of each domain
    length: int  # T
    cut_length: int  # tokens of the reports' windows, of which the first T are read where a domain was fitted to
    seed: int  # of the windows and of the bootstrap
    bos: str  # first token of a window, as a report has it
    fitted: Mapping[str, frozenset[int]]  # of each domain the numbers of the windows to which anything was fitted

    def windows(self, recipe: HealRecipe, tokenizer: PreTrainedTokenizerBase) -> Windows:
        """Cut the windows."""
        trained = {part.name: part for part in recipe.data.domains if embedded_source(part)}
        pairs = []
        for name, documents in embedded_domains(self.counts).items():
            fitted = frozenset() if name in trained else self.fitted.get(name, frozenset())
            try:
                if name in trained:
                    documents = list(trained[name].domain().held_out())
                if fitted and self.length > self.cut_length:
                    raise ValueError(
                        f"eval.length is {self.length}, and W_c or layers were fitted to other windows of "
                        f"{self.cut_length} tokens; use {self.cut_length} at most, or leave {name} out of eval.domains"
                    )
                pairs.append((name, self._cut(documents, tokenizer, self.counts[name], fitted)))
            except ValueError as error:
                raise ValueError(f"eval: {name}: {error}") from None
        return joined(pairs)

    def _cut(
        self, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, count: int, fitted: frozenset[int]
    ) -> Windows:
        """Return the first windows to which nothing was fitted; of the reports' list their first tokens."""
        unseen = (number for number in itertools.count() if number not in fitted)
        numbers = list(itertools.islice(unseen, count))
        length = self.cut_length if fitted else self.length
        parts = {"evaluation": numbers[-1] + 1}
        every = split(documents, tokenizer, parts=parts, length=length, seed=self.seed, bos=self.bos)["evaluation"]
        return Windows(every.ids[numbers, : self.length], tuple(every.documents[number] for number in numbers))


def evaluation_windows(recipe: HealRecipe, retrofits: Sequence[Retrofit]) -> EvaluationWindows:
    """Find out how to cut the windows: as the reports say, but for what the recipe's `eval` says."""
    length, seed, bos = (_shared(retrofits, name) for name in ("length", "seed", "bos"))
    domains = recipe.eval.domains or _shared(retrofits, "domains", "eval.domains")
    for name in domains:
        if name not in EMBEDDED:
            raise ValueError(
                f"{retrofits[0].name!r} was judged on {name!r}, which is no embedded domain; name eval.domains: "
                f"{', '.join(EMBEDDED)}"
            )
    windows = recipe.eval.windows or _shared(retrofits, "windows", "eval.windows")
    if windows < MIN_WINDOWS * len(domains):
        raise ValueError(
            f"eval.windows is {windows}; {len(domains)} domains need at least {MIN_WINDOWS * len(domains)}: "
            "say more there, or fewer eval.domains"
        )
    fitted = {name: frozenset().union(*(_fitted(retrofit, name) for retrofit in retrofits)) for name in domains}
    return EvaluationWindows(shared_out(windows, domains), recipe.eval.length or length, length, seed, bos, fitted)


def _fitted(retrofit: Retrofit, name: str) -> range:
    """Return which windows of a domain a retrofit was fitted to: they follow those that judged it."""
    report = retrofit.report
    parts = Texts({}, tuple(report.fitted), tuple(report.judged)).parts(Request(report.settings))
    start = parts["evaluation"].get(name, 0)
    count = sum(parts[part].get(name, 0) for part in ("calibration", "choice", "search") if part in parts)
    return range(start, start + count)


def _shared(retrofits: Sequence[Retrofit], what: str, key: str | None = None) -> Any:
    """Return an option of the reports, which must be the same in all; `key` of a recipe can say it instead."""
    options = [{**vars(part.report.settings), "domains": tuple(part.report.judged)} for part in retrofits]
    said = [", ".join(option[what]) if what == "domains" else str(option[what]) for option in options]
    for retrofit, other in zip(retrofits, said, strict=True):
        if other != said[0]:
            way = "heal them one by one" if key is None else f"say {key}, or heal them one by one"
            raise ValueError(
                f"the report of {retrofits[0].name!r} was judged with {what} {said[0]}, that of {retrofit.name!r} "
                f"with {other}; {way}"
            )
    return options[0][what]

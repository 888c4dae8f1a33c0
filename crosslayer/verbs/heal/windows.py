"""The evaluation windows: those of the retrofits' reports, without any calibration window.

A retrofit cuts each domain into a list of windows that depends on length, seed and `bos` only: first the evaluation
windows, then the calibration windows. The same list is cut again here, and windows are taken from its start, except
those that any of the retrofits was calibrated on. For a training domain, windows come from its held-out pieces, which
may hold calibration text.

Shapes: N windows, T tokens of a window.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.domains import EMBEDDED, embedded_domains, joined, shared_out
from crosslayer.corpus.windows import Windows, split
from crosslayer.judge.damage import MIN_WINDOWS
from crosslayer.verbs.heal.recipe import HealRecipe, embedded_source
from crosslayer.verbs.heal.retrofits import Retrofit
from crosslayer.verbs.retrofit.strategies import strategy_of
from crosslayer.verbs.retrofit.texts import RetrofitTexts


@dataclass(frozen=True)
class EvaluationWindows:
    """How the evaluation windows are cut."""

    counts: Mapping[str, int]  # N by domain
    length: int  # T
    cut_length: int  # tokens of the reports' windows; of a calibration domain only the first T are used
    seed: int  # of the windows and of the bootstrap
    bos: str  # BOS token, as in the reports
    fitted: Mapping[str, frozenset[int]]  # calibration windows by domain, as indices into the list

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
                        f"eval.length must be at most {self.cut_length}, the length of the calibration windows, got "
                        f"{self.length}; or remove {name} from eval.domains"
                    )
                pairs.append((name, self._cut(documents, tokenizer, self.counts[name], fitted)))
            except ValueError as error:
                raise ValueError(f"eval: {name}: {error}") from None
        return joined(pairs)

    def _cut(
        self, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, count: int, fitted: frozenset[int]
    ) -> Windows:
        """Return the first windows that are not in `fitted`, cut off at T tokens."""
        unseen = (number for number in itertools.count() if number not in fitted)
        numbers = list(itertools.islice(unseen, count))
        length = self.cut_length if fitted else self.length
        counts = {"evaluation": numbers[-1] + 1}
        every = split(documents, tokenizer, parts=counts, length=length, seed=self.seed, bos=self.bos)["evaluation"]
        return Windows(every.ids[numbers, : self.length], tuple(every.documents[number] for number in numbers))


def evaluation_windows(recipe: HealRecipe, retrofits: Sequence[Retrofit]) -> EvaluationWindows:
    """Return how to cut the windows: as in the reports, unless the recipe's `eval` differs."""
    length, seed, bos = (_shared(retrofits, name) for name in ("length", "seed", "bos"))
    domains = recipe.eval.domains or _shared(retrofits, "domains", "eval.domains")
    for name in domains:
        if name not in EMBEDDED:
            raise ValueError(
                f"{retrofits[0].name!r} was evaluated on {name!r}, which is not an embedded domain; set eval.domains "
                f"to some of {', '.join(EMBEDDED)}"
            )
    windows = recipe.eval.windows or _shared(retrofits, "windows", "eval.windows")
    if windows < MIN_WINDOWS * len(domains):
        raise ValueError(
            f"eval.windows must be at least {MIN_WINDOWS * len(domains)} for {len(domains)} domains, got {windows}; "
            "raise it, or use fewer eval.domains"
        )
    fitted = {name: frozenset().union(*(_fitted(retrofit, name) for retrofit in retrofits)) for name in domains}
    return EvaluationWindows(shared_out(windows, domains), recipe.eval.length or length, length, seed, bos, fitted)


def _fitted(retrofit: Retrofit, name: str) -> range:
    """Return the calibration windows of a retrofit in a domain; they follow its evaluation windows."""
    report = retrofit.report
    counts = RetrofitTexts({}, tuple(report.fitted), tuple(report.judged)).window_counts(strategy_of(report.settings))
    start = counts["evaluation"].get(name, 0)
    count = sum(counts[use].get(name, 0) for use in ("calibration", "choice", "search") if use in counts)
    return range(start, start + count)


def _shared(retrofits: Sequence[Retrofit], option: str, key: str | None = None) -> Any:
    """Return an option of the reports, which must be equal in all; `key` of the recipe can replace it."""
    settings = [{**vars(each.report.settings), "domains": tuple(each.report.judged)} for each in retrofits]
    values = [", ".join(each[option]) if option == "domains" else str(each[option]) for each in settings]
    for retrofit, value in zip(retrofits, values, strict=True):
        if value != values[0]:
            remedy = "heal them separately" if key is None else f"set {key}, or heal them separately"
            raise ValueError(
                f"retrofits must have been evaluated with the same {option}: {retrofits[0].name!r} has {values[0]}, "
                f"{retrofit.name!r} has {value}; {remedy}"
            )
    return settings[0][option]

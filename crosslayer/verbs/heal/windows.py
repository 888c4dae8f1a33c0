"""The evaluation windows: those of the retrofits' reports, without any that a retrofit was fitted or searched on.

A retrofit cuts each domain into a list of windows that depends on length, seed and `bos` only; its record has the use
of each. The same list is cut again here, and windows are taken from its start, except those that any of the
retrofits was calibrated on. For a training domain, windows come from its held-out pieces, which may hold calibration
text.

Shapes: N windows, T tokens of a window.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.domains import EMBEDDED, embedded_domains, joined, shared_out
from crosslayer.corpus.windows import Windows, split
from crosslayer.judge.damage import MIN_WINDOWS
from crosslayer.training.recipe import Recipe
from crosslayer.verbs.heal.retrofits import Retrofit

JUDGED = ("evaluation", "trade-off")  # purposes that do not change a retrofit


def evaluation_windows(recipe: Recipe, retrofits: Sequence[Retrofit], tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Cut the windows as in the reports, unless the recipe's `judge` differs.

    Raises:
        ValueError: the reports differ, or their windows were fitted and are shorter than `judge.length`.
    """
    judge, trained = recipe.judge, {part.name: part for part in recipe.data.domains if part.source is None}
    cut, seed, bos = (_shared(retrofits, name) for name in ("length", "seed", "bos"))
    length, windows = judge.length or cut, judge.windows or _shared(retrofits, "windows", "judge.windows")
    domains = judge.domains or _shared(retrofits, "domains", "judge.domains")
    for name in domains:
        if name not in EMBEDDED:
            raise ValueError(
                f"{retrofits[0].name!r} was evaluated on {name!r}, which is not an embedded domain; set judge.domains "
                f"to some of {', '.join(EMBEDDED)}"
            )
    least = MIN_WINDOWS * len(domains)
    if windows < least:
        raise ValueError(
            f"judge.windows must be at least {least} for {len(domains)} domains, got {windows}; raise it, or use fewer "
            "judge.domains"
        )
    pairs = []
    for name, count in shared_out(windows, domains).items():
        fitted = set() if name in trained else {number for each in retrofits for number in _fitted(each, name)}
        try:
            if fitted and length > cut:
                raise ValueError(
                    f"judge.length must be at most {cut}, the length of the calibration windows, got {length}; or "
                    f"remove {name} from judge.domains"
                )
            text: Iterable[str] = embedded_domains([name])[name]
            if name in trained:
                text = list(trained[name].text(held_out_often=True).held_out())
            numbers = list(itertools.islice((number for number in itertools.count() if number not in fitted), count))
            options = {"length": cut if fitted else length, "seed": seed, "bos": bos}
            (every,) = split(text, tokenizer, parts={"evaluation": numbers[-1] + 1}, **options).values()
        except ValueError as error:
            raise ValueError(f"judge: {name}: {error}") from None
        pairs.append((name, Windows(every.ids[numbers, :length], tuple(every.documents[number] for number in numbers))))
    return joined(pairs)


def _fitted(retrofit: Retrofit, name: str) -> Iterator[int]:
    """Yield the windows of a domain that a retrofit was fitted or searched on."""
    for purpose, ranges in retrofit.report.windows.items():
        if name in ranges and purpose not in JUDGED:
            first, count = ranges[name]
            yield from range(first, first + count)


def _shared(retrofits: Sequence[Retrofit], option: str, key: str | None = None) -> Any:
    """Return an option of the reports, which must be equal in all; `key` of the recipe can replace it."""
    settings = [{**vars(each.report.settings), "domains": tuple(each.report.judged)} for each in retrofits]
    values = [", ".join(each[option]) if option == "domains" else str(each[option]) for each in settings]
    for retrofit, value in zip(retrofits, values, strict=True):
        if value != values[0]:
            remedy = "heal them separately" if key is None else f"set {key}, or heal them separately"
            raise ValueError(
                f"retrofits must have been evaluated with the same {option}, got {values[0]} for {retrofits[0].name!r} "
                f"and {value} for {retrofit.name!r}; {remedy}"
            )
    return settings[0][option]

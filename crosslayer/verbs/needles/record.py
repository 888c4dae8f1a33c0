"""What `record.json` of a search for needles holds, every question and every answer, and how these are scored.

Answers are scored as by RULER's `string_match` (arXiv 2404.06654): a score is the share of expected values that stand
in the output, in any case; here one value is expected, so 0 or 1.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from crosslayer.eviction.eviction import Evict
from crosslayer.output.record import SEVERAL, Frozen, ModelFacts, Options, Seed
from crosslayer.stats import Interval
from crosslayer.stats.shares import Verdict, mcnemar, share_difference, verdict_of, wilson
from crosslayer.verbs.needles.text import KEYS

SHORTEST = 256  # tokens; below, template and needles leave no haystack
_CONTROL = re.compile(r"[\x00-\x1f]")


class NeedlesSettings(Options):
    """Every length with every depth, `samples` times."""

    lengths: Annotated[tuple[int, ...], SEVERAL]
    depths: Annotated[tuple[int, ...], SEVERAL]
    keys: int
    samples: PositiveInt
    new_tokens: PositiveInt
    batch: PositiveInt
    evict: Evict | None = None
    seed: Seed

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Every length with every depth."""
        return [(length, depth) for length in self.lengths for depth in self.depths]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.lengths) < SHORTEST:
            raise ValueError(f"length {min(self.lengths)} is too short; use at least {SHORTEST} tokens")
        wrong = [depth for depth in self.depths if not 0 <= depth <= 100]
        if wrong:
            raise ValueError(f"depths is {wrong[0]}; use 0 (the beginning) to 100 (the end), in per cent")
        if not 1 <= self.keys <= len(KEYS):
            raise ValueError(f"keys is {self.keys}; use 1 to {len(KEYS)}")
        return self


class Question(Frozen):
    """A sample without its text, which follows from the settings: its place, its tokens, its key and the values."""

    length: int
    depth: int
    index: int
    tokens: int = Field(description="of the prompt, by the candidate's tokenizer")
    key: str
    value: str
    others: tuple[str, ...] = Field(description="values of the other keys, in the order of the text")


class FoundShare(Frozen):
    """Answers with the value, out of n; `other`: without it, but with the value of another key."""

    length: int
    depth: int | None = Field(description="None over all depths of a length")
    n: int = Field(ge=1)
    found: int = Field(ge=0)
    other: int = Field(ge=0)
    interval: Interval = Field(description="Wilson's 95 % interval of the share")

    @property
    def share(self) -> float:
        """The share of answers that hold the value, from 0 to 1."""
        return self.found / self.n


class AskedModel(ModelFacts):
    """A model and what it said: an answer for each question."""

    answers: tuple[str, ...]


class FoundDifference(Frozen):
    """The score of the candidate minus the baseline's, at a length, over n samples that both were asked.

    `gained` were found by the candidate alone, `lost` by the baseline alone.
    """

    length: int
    n: int = Field(ge=1)
    gained: int = Field(ge=0)
    lost: int = Field(ge=0)
    interval: Interval = Field(description="95 %, for pairs (Agresti and Min)")

    @property
    def mean(self) -> float:
        """The difference of the shares, from −1 to 1."""
        return (self.gained - self.lost) / self.n

    @property
    def verdict(self) -> Verdict:
        """Whether the candidate finds more or fewer numbers."""
        return verdict_of(self.interval, p=mcnemar(self.gained, self.lost))


def string_match(output: str, values: Sequence[str]) -> float:
    """Return the share of the expected values (one at least) that stand in an output, in any case."""
    cleaned = _CONTROL.sub("\n", output.strip()).strip().lower()
    return sum(value.lower() in cleaned for value in values) / len(values)


def is_found(output: str, value: str) -> bool:
    """Return whether the only value that is expected stands in an output."""
    return string_match(output, [value]) == 1.0


def score(length: int, depth: int | None, found: Sequence[bool], other: Sequence[bool]) -> FoundShare:
    """Return the score of n answers: whether each holds the value, and whether it holds that of another key.

    An answer with both counts as found alone, as RULER has it.
    """
    strayed = sum(stray and not right for right, stray in zip(found, other, strict=True))
    interval = wilson(sum(found), len(found))
    return FoundShare(length=length, depth=depth, n=len(found), found=sum(found), other=strayed, interval=interval)


def difference(length: int, candidate: Sequence[bool], baseline: Sequence[bool]) -> FoundDifference:
    """Return the difference candidate − baseline of shares over n samples that both were asked, with its interval."""
    pairs = list(zip(candidate, baseline, strict=True))
    gained, lost = pairs.count((True, False)), pairs.count((False, True))
    interval = share_difference(gained, lost, len(pairs))
    return FoundDifference(length=length, n=len(pairs), gained=gained, lost=lost, interval=interval)

"""The contents of a needle test's `record.json`, with every question and answer."""

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from crosslayer.eviction.eviction import Evict
from crosslayer.judge.phrasing import KEYS
from crosslayer.output.record import SEVERAL, Frozen, ModelFacts, Options, Seed
from crosslayer.stats.estimate import Estimate
from crosslayer.stats.shares import share, share_difference
from crosslayer.wiring.kv_bits import KvBitsText

SHORTEST = 256  # tokens; below, template and needles leave no space for a haystack


class NeedlesSettings(Options):
    """The options of a needle test: every length is combined with every depth, `samples` times."""

    lengths: Annotated[tuple[int, ...], SEVERAL]
    depths: Annotated[tuple[int, ...], SEVERAL]
    keys: int
    samples: PositiveInt
    new_tokens: PositiveInt
    batch: PositiveInt
    evict: Evict | None = None
    kv_bits: KvBitsText | None = None
    seed: Seed

    @property
    def cells(self) -> list[tuple[int, int]]:
        """All combinations of a length and a depth."""
        return [(length, depth) for length in self.lengths for depth in self.depths]

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = []
        if min(self.lengths) < SHORTEST:
            wrong.append(f"`lengths` must be at least {SHORTEST} tokens, got {min(self.lengths)}")
        outside = [depth for depth in self.depths if not 0 <= depth <= 100]
        if outside:
            wrong.append(f"`depths` must be 0-100, got {outside[0]}")
        if not 1 <= self.keys <= len(KEYS):
            wrong.append(f"`keys` must be 1-{len(KEYS)}, got {self.keys}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class Score(Frozen):
    """How many answers contain the value (`retrieved`), or only that of another key (`other`), and their share."""

    length: int
    depth: int | None = Field(description="None for all depths of a length")
    retrieved: int = Field(ge=0)
    other: int = Field(ge=0)
    share: Estimate


class ModelAnswers(ModelFacts):
    """A model and its answer to each question."""

    answers: tuple[str, ...]


class ScoreDifference(Frozen):
    """The candidate's score minus the baseline's at a length, over the same samples.

    `gained` numbers were retrieved only by the candidate, `lost` only by the baseline.
    """

    length: int
    gained: int = Field(ge=0)
    lost: int = Field(ge=0)
    change: Estimate


def score(length: int, depth: int | None, retrieved: Sequence[bool], other: Sequence[bool]) -> Score:
    """Return the score of n answers: whether each contains the value, and whether it contains another key's value.

    An answer with both counts only as retrieved, as in RULER.
    """
    wrong_key = sum(wrong and not right for right, wrong in zip(retrieved, other, strict=True))
    right = sum(retrieved)
    return Score(length=length, depth=depth, retrieved=right, other=wrong_key, share=share(right, len(retrieved)))


def difference(length: int, candidate: Sequence[bool], baseline: Sequence[bool]) -> ScoreDifference:
    """Return the difference candidate − baseline of shares over the same n samples."""
    pairs = list(zip(candidate, baseline, strict=True))
    gained, lost = pairs.count((True, False)), pairs.count((False, True))
    change = share_difference(gained, lost, len(pairs))
    return ScoreDifference(length=length, gained=gained, lost=lost, change=change)

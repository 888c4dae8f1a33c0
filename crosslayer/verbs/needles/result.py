"""The result of a needle test."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from crosslayer.cache.eviction import Evict
from crosslayer.judge.hidden import KEYS, Question, is_retrieved
from crosslayer.judge.report import Report
from crosslayer.output.formatting import Table
from crosslayer.output.record import SEVERAL, Options, Seed
from crosslayer.stats.differences import share
from crosslayer.stats.estimate import Estimate
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


class Needles(Report):
    """What `crosslayer.needles` returns: the score of each model by length, every answer, and a page.

    Answers are scored like RULER's `string_match` (arXiv 2404.06654). The scope of a row is a length: 512 tokens.
    """

    schema_: Literal["crosslayer/needles/4"] = Field(default="crosslayer/needles/4", alias="schema")
    settings: NeedlesSettings
    questions: tuple[Question, ...]
    answers: tuple[tuple[str, ...], ...] = Field(description="to each question, of each of `models`")

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        """Refuse questions and answers that do not match the settings."""
        expected = [(*cell, index) for cell in self.settings.cells for index in range(self.settings.samples)]
        if [(question.length, question.depth, question.index) for question in self.questions] != expected:
            raise ValueError("the questions do not match lengths, depths and samples")
        if len(self.answers) != len(self.models):
            raise ValueError(f"answers of {len(self.answers)} models, of {len(self.models)}")
        for answers in self.answers:
            if len(answers) != len(expected):
                raise ValueError(f"{len(answers)} answers to {len(expected)} questions")
        return self

    def found(self, model: int, length: int | None = None, depth: int | None = None) -> list[bool]:
        """Return which answers of a model, by its number, contain their number, of all or at a length and depth."""
        pairs = zip(self.questions, self.answers[model], strict=True)
        chosen = [(one, answer) for one, answer in pairs if length in (None, one.length) and depth in (None, one.depth)]
        return [is_retrieved(answer, one.value) for one, answer in chosen]

    def score(self, model: int, length: int, depth: int | None = None) -> Estimate:
        """Return the share of numbers that a model retrieves at a length, and at a depth, with Wilson's interval."""
        found = self.found(model, length, depth)
        return share(sum(found), len(found))

    def tables(self) -> list[Table]:
        """Return a table of scores for each model: a row for each length, a column for each depth."""
        return self.sibling("page").scores(self)

"""The result of a search for needles."""

from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.verbs.needles.record import (
    AskedModel,
    FoundDifference,
    FoundShare,
    NeedlesSettings,
    Question,
    difference,
    is_found,
    score,
)


class Needles(Result):
    """What `crosslayer.needles` returns: scores of S sides by N lengths and D depths, typed, as arrays, as a page.

    The axis of sides is the candidate and, where there is one, the baseline.
    """

    schema_: Literal["crosslayer/needles/3"] = Field(default="crosslayer/needles/3", alias="schema")
    settings: NeedlesSettings
    questions: tuple[Question, ...]
    candidate: AskedModel
    baseline: AskedModel | None
    seconds: float = Field(description="without loading")

    @property
    def sides(self) -> tuple[AskedModel, ...]:
        """The candidate and, where there is one, the baseline."""
        return (self.candidate,) if self.baseline is None else (self.candidate, self.baseline)

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        """Refuse questions and answers that are not those of the settings."""
        places = [(*cell, index) for cell in self.settings.cells for index in range(self.settings.samples)]
        if [(question.length, question.depth, question.index) for question in self.questions] != places:
            raise ValueError("the questions are not those of the lengths, depths and samples")
        for side in self.sides:
            if len(side.answers) != len(places):
                raise ValueError(f"{len(side.answers)} answers to {len(places)} questions")
        return self

    @cached_property
    def cells(self) -> list[list[FoundShare]]:
        """The scores of each side by length and depth."""
        return [[score(*cell, *self._marks(side, *cell)) for cell in self.settings.cells] for side in self.sides]

    @cached_property
    def by_length(self) -> list[list[FoundShare]]:
        """The scores of each side by length, over all depths."""
        lengths = self.settings.lengths
        return [[score(length, None, *self._marks(side, length)) for length in lengths] for side in self.sides]

    @cached_property
    def differences(self) -> list[FoundDifference]:
        """Candidate − baseline by length; empty without a baseline."""
        lengths = () if self.baseline is None else self.settings.lengths
        return [difference(length, *(self._marks(side, length)[0] for side in self.sides)) for length in lengths]

    def _marks(self, side: AskedModel, length: int, depth: int | None = None) -> tuple[list[bool], list[bool]]:
        """Return of each answer (at a depth) whether it holds the value, and whether it holds that of another key."""
        pairs = zip(self.questions, side.answers, strict=True)
        pairs = [(one, text) for one, text in pairs if one.length == length and depth in (None, one.depth)]
        other = [any(is_found(text, value) for value in one.others) for one, text in pairs]
        return [is_found(text, one.value) for one, text in pairs], other

    @property
    def scores(self) -> np.ndarray:
        """The share of answers that hold the value, by side, length and depth, (S, N, D)."""
        shares = np.array([[one.share for one in cells] for cells in self.cells])
        return shares.reshape(len(self.sides), len(self.settings.lengths), -1)

    @property
    def intervals(self) -> np.ndarray:
        """The ends of Wilson's 95 % intervals of `scores`, (S, N, D, 2)."""
        return np.array([[one.interval for one in cells] for cells in self.cells]).reshape(*self.scores.shape, 2)

    @property
    def scores_by_length(self) -> np.ndarray:
        """The same share over all depths, (S, N)."""
        return np.array([[one.share for one in scores] for scores in self.by_length])

    def tables(self) -> list[Table]:
        """Return the scores of each side: a row for each length, a column for each depth."""
        return self.sibling("page").scores(self)

    def headline(self) -> dict[str, Any]:
        """Return names, the number of keys, and scores and differences by length."""
        scores = [{str(one.length): round(one.share, 4) for one in scores} for scores in self.by_length]
        figures: dict[str, Any] = {"model": self.candidate.name, "keys": self.settings.keys, "scores": scores[0]}
        if self.baseline is not None:
            figures |= {"baseline": self.baseline.name, "baseline_scores": scores[1]}
            figures |= {"differences": {str(one.length): round(one.mean, 4) for one in self.differences}}
        return figures

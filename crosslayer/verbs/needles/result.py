"""The result of a search for needles."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.verbs.needles.record import AskedModel, FoundDifference, NeedlesSettings, Question


class Needles(Result):
    """What `crosslayer.needles` returns: scores of S sides by N lengths and D depths, typed, as arrays, as a page.

    The axis of sides is the candidate and, where there is one, the baseline.
    """

    schema_: Literal["crosslayer/needles/2"] = Field(default="crosslayer/needles/2", alias="schema")
    settings: NeedlesSettings
    questions: tuple[Question, ...]
    candidate: AskedModel
    baseline: AskedModel | None
    differences: tuple[FoundDifference, ...] = Field(description="by length; empty without a baseline")
    seconds: float

    @property
    def sides(self) -> tuple[AskedModel, ...]:
        """The candidate and, where there is one, the baseline."""
        return (self.candidate,) if self.baseline is None else (self.candidate, self.baseline)

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        """Refuse questions, answers and scores that are not those of the settings."""
        lengths, cells = list(self.settings.lengths), self.settings.cells
        places = [(*cell, index) for cell in cells for index in range(self.settings.samples)]
        if [(question.length, question.depth, question.index) for question in self.questions] != places:
            raise ValueError("the questions are not those of the lengths, depths and samples")
        for side in self.sides:
            if len(side.answers) != len(places):
                raise ValueError(f"{len(side.answers)} answers to {len(places)} questions")
            if [(score.length, score.depth) for score in side.cells] != cells:
                raise ValueError("the scores are not those of the lengths and depths")
            if [(score.length, score.depth) for score in side.by_length] != [(length, None) for length in lengths]:
                raise ValueError("the scores by length are not those of the lengths")
        if [difference.length for difference in self.differences] != (lengths if self.baseline is not None else []):
            raise ValueError("the differences are not those of the lengths")
        return self

    @property
    def scores(self) -> np.ndarray:
        """The share of answers that hold the value, by side, length and depth, (S, N, D)."""
        shares = np.array([[score.share for score in side.cells] for side in self.sides])
        return shares.reshape(len(self.sides), len(self.settings.lengths), -1)

    @property
    def intervals(self) -> np.ndarray:
        """The ends of Wilson's 95 % intervals of `scores`, (S, N, D, 2)."""
        ends = np.array([[score.interval for score in side.cells] for side in self.sides])
        return ends.reshape(*self.scores.shape, 2)

    @property
    def scores_by_length(self) -> np.ndarray:
        """The same share over all depths, (S, N)."""
        return np.array([[score.share for score in side.by_length] for side in self.sides])

    def tables(self) -> list[Table]:
        """Return the scores of each side: a row for each length, a column for each depth."""
        return [self.sibling("page").scores(side, self.settings.depths) for side in self.sides]

    def headline(self) -> dict[str, Any]:
        """Return names, the number of keys, and scores and differences by length."""
        figures: dict[str, Any] = {"model": self.candidate.name, "keys": self.settings.keys}
        figures |= {"scores": _by_length(self.candidate)}
        if self.baseline is not None:
            figures |= {"baseline": self.baseline.name, "baseline_scores": _by_length(self.baseline)}
            figures |= {"differences": {str(one.length): round(one.mean, 4) for one in self.differences}}
        return figures


def _by_length(side: AskedModel) -> dict[str, float]:
    return {str(score.length): round(score.share, 4) for score in side.by_length}

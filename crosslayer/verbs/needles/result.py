"""The result of a needle test."""

from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from crosslayer.judge.hidden import Question, is_retrieved
from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.verbs.needles.record import (
    ModelAnswers,
    NeedlesSettings,
    Score,
    ScoreDifference,
    difference,
    score,
)


class Needles(Result):
    """What `crosslayer.needles` returns: scores of M models by N lengths and D depths, and a page."""

    schema_: Literal["crosslayer/needles/3"] = Field(default="crosslayer/needles/3", alias="schema")
    settings: NeedlesSettings
    questions: tuple[Question, ...]
    candidate: ModelAnswers
    baseline: ModelAnswers | None
    seconds: float = Field(description="without loading")

    @property
    def models(self) -> tuple[ModelAnswers, ...]:
        """The candidate and, if there is one, the baseline."""
        return (self.candidate,) if self.baseline is None else (self.candidate, self.baseline)

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        """Refuse questions and answers that do not match the settings."""
        expected = [(*cell, index) for cell in self.settings.cells for index in range(self.settings.samples)]
        if [(question.length, question.depth, question.index) for question in self.questions] != expected:
            raise ValueError("the questions do not match lengths, depths and samples")
        for model in self.models:
            if len(model.answers) != len(expected):
                raise ValueError(f"{len(model.answers)} answers to {len(expected)} questions")
        return self

    @cached_property
    def cells(self) -> list[list[Score]]:
        """The scores of each model by length and depth."""
        return [[score(*cell, *self._marks(model, *cell)) for cell in self.settings.cells] for model in self.models]

    @cached_property
    def by_length(self) -> list[list[Score]]:
        """The scores of each model by length, over all depths."""
        lengths = self.settings.lengths
        return [[score(length, None, *self._marks(model, length)) for length in lengths] for model in self.models]

    @cached_property
    def differences(self) -> list[ScoreDifference]:
        """Candidate − baseline by length; empty without a baseline."""
        lengths = () if self.baseline is None else self.settings.lengths
        return [difference(length, *(self._marks(model, length)[0] for model in self.models)) for length in lengths]

    def _marks(self, model: ModelAnswers, length: int, depth: int | None = None) -> tuple[list[bool], list[bool]]:
        """Return for each answer (at a depth) whether it contains the value, and whether another key's value."""
        pairs = zip(self.questions, model.answers, strict=True)
        pairs = [(one, text) for one, text in pairs if one.length == length and depth in (None, one.depth)]
        other = [any(is_retrieved(text, value) for value in one.others) for one, text in pairs]
        return [is_retrieved(text, one.value) for one, text in pairs], other

    def tables(self) -> list[Table]:
        """Return a table of scores for each model: a row for each length, a column for each depth."""
        return self.sibling("page").scores(self)

    def headline(self) -> dict[str, Any]:
        """Return names, the number of keys, and scores and differences by length."""
        scores = [{str(one.length): round(one.share.value, 4) for one in scores} for scores in self.by_length]
        figures: dict[str, Any] = {"model": self.candidate.name, "keys": self.settings.keys, "scores": scores[0]}
        if self.baseline is not None:
            figures |= {"baseline": self.baseline.name, "baseline_scores": scores[1]}
            figures |= {"differences": {str(one.length): round(one.change.value, 4) for one in self.differences}}
        return figures

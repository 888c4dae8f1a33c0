"""The result of a search for needles."""

from typing import Any

import numpy as np

from crosslayer.output.page import Page
from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.verbs.needles.page import layout, scores
from crosslayer.verbs.needles.record import NeedlesRecord, Side
from crosslayer.verbs.needles.words import sentences


class Needles(NeedlesRecord, Result):
    """What `crosslayer.needles` returns: scores of S sides by N lengths and D depths, typed, as arrays, as a page.

    The axis of sides is the candidate and, where there is one, the baseline.
    """

    @property
    def scores(self) -> np.ndarray:
        """The share of answers that hold the value, by side, length and depth, (S, N, D)."""
        shape = len(self.sides), len(self.settings.lengths), len(self.settings.depths)
        return np.array([[score.share for score in side.cells] for side in self.sides]).reshape(shape)

    @property
    def intervals(self) -> np.ndarray:
        """The ends of Wilson's 95 % intervals of `scores`, (S, N, D, 2)."""
        shape = len(self.sides), len(self.settings.lengths), len(self.settings.depths), 2
        return np.array([[score.interval for score in side.cells] for side in self.sides]).reshape(shape)

    @property
    def scores_by_length(self) -> np.ndarray:
        """The same share over all depths, (S, N)."""
        return np.array([[score.share for score in side.by_length] for side in self.sides])

    def layout(self) -> Page:
        """Return the parts of the page."""
        return layout(self)

    def sentences(self) -> list[str]:
        """Return what was found, in sentences."""
        return sentences(self)

    def tables(self) -> list[Table]:
        """Return the scores of each side: a row for each length, a column for each depth."""
        return [scores(side, self.settings.depths) for side in self.sides]

    def headline(self) -> dict[str, Any]:
        """Return names, the number of keys, and scores and differences by length."""
        figures: dict[str, Any] = {"model": self.candidate.name, "keys": self.settings.keys}
        figures |= {"scores": _by_length(self.candidate)}
        if self.baseline is not None:
            figures |= {"baseline": self.baseline.name, "baseline_scores": _by_length(self.baseline)}
            figures |= {"differences": {str(one.length): round(one.mean, 4) for one in self.differences}}
        return figures


def _by_length(side: Side) -> dict[str, float]:
    return {str(score.length): round(score.share, 4) for score in side.by_length}

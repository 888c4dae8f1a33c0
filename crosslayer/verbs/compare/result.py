"""The result of a comparison."""

from typing import Any

import numpy as np

from crosslayer.output.page import Page
from crosslayer.output.result import Result
from crosslayer.verbs.compare.page import layout
from crosslayer.verbs.compare.record import ComparisonRecord, Outcome
from crosslayer.verbs.compare.words import sentences


class Comparison(ComparisonRecord, Result):
    """What `crosslayer.compare` returns. Shapes: A outcomes (an arm beside the baseline in a setting), D domains."""

    @property
    def differences(self) -> np.ndarray:
        """Final losses, arm − baseline, mean over pairs of seeds, (A,); NaN without a pair."""
        return np.array([np.nan if result.final is None else result.final.mean for result in self.outcomes])

    @property
    def intervals(self) -> np.ndarray:
        """Their 95 % intervals, each taken alone, (A, 2); NaN below three pairs."""
        none = (np.nan, np.nan)
        return np.array([(result.final and result.final.interval) or none for result in self.outcomes])

    @property
    def adjusted(self) -> np.ndarray:
        """Their p-values by Holm, for all comparisons together, (A,); NaN below three pairs."""
        return np.array([result.adjusted for result in self.outcomes], dtype=float)

    @property
    def domain_differences(self) -> np.ndarray:
        """The same difference in each domain, (A, D); NaN without a pair."""
        rows = [[result.domains.get(name) for name in self.domains] for result in self.outcomes]
        return np.array([[np.nan if part is None else part.mean for part in row] for row in rows])

    def layout(self) -> Page:
        """Return the parts of the page."""
        return layout(self)

    def sentences(self) -> list[str]:
        """Return what was found, in sentences."""
        return sentences(self)

    def headline(self) -> dict[str, Any]:
        """Return the baseline, and of each arm in each setting the difference, its interval and the verdict."""
        return {"name": self.name, "baseline": self.baseline, "results": [_figures(part) for part in self.outcomes]}


def _figures(result: Outcome) -> dict[str, Any]:
    final = result.final
    interval = None if final is None or final.interval is None else [round(end, 5) for end in final.interval]
    return {
        **({"setting": result.setting} if result.setting else {}),
        "arm": result.arm,
        "seeds": len(result.seeds),
        "loss": round(result.loss, 5),
        "difference": None if final is None else round(final.mean, 5),
        "interval": interval,
        "verdict": result.verdict,
    }

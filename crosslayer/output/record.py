"""What records have in common."""

import json
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field


class Measure(BaseModel):
    """A measure by layer: mean over n sequences and 95 % Student-t interval, a pair [low, high] for each entry."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    mean: list[Any]
    ci95: list[Any] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)

    @property
    def array(self) -> np.ndarray:
        """The mean as float64, NaN where a layer has no such sublayer."""
        return np.array(self.mean, dtype=float)

    @property
    def interval(self) -> np.ndarray | None:
        """The ends of the 95 % interval, (…, 2) for a mean of shape (…), None for a single sequence."""
        return None if self.ci95 is None else np.array(self.ci95, dtype=float)


class PositionBins(BaseModel):
    """A quantity of single positions, averaged over bins that widen with the position.

    `edges` holds the first position of each bin, `length` the tokens of a sequence, `mean` (L, bins) the mean of one
    position in the bin.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    edges: list[int]
    length: int = Field(ge=1)
    mean: list[list[float | None]]


def dumps(record: dict[str, Any]) -> str:
    """Write a record as JSON; a NaN or an infinity is an error, never a value."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)

"""What records have in common."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Measure(BaseModel):
    """A measure by layer: mean over n sequences and 95 % Student-t interval, a pair [low, high] for each entry."""

    model_config = ConfigDict(extra="forbid")
    mean: list[Any]
    ci95: list[Any] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)


def dumps(record: dict[str, Any]) -> str:
    """Write a record as JSON; a NaN or an infinity is an error, never a value."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)

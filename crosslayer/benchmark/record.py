"""What `record.json` of a bench holds."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

CLEAR = 0.9  # the coverage from which an interval of a bench decides: 5 pairs


class BenchRecord(BaseModel):
    """What `record.json` of a bench holds: times in seconds, sizes in bytes, a row for each context and batch size."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: str = Field(alias="schema", pattern="^crosslayer/bench/1$")
    models: dict[str, dict[str, Any]] = Field(description="candidate and baseline")
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = Field(min_length=1)
    skipped: list[dict[str, Any]] = Field(description="settings that did not fit, with the reason")
    no_prediction: str | None = Field(description="why nothing is predicted")
    interval_coverage: float = Field(ge=0, le=1, description="how often an interval of so many pairs holds the median")
    seconds: float
    environment: dict[str, Any]

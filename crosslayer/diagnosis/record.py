"""What `record.json` of a diagnosis holds."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from crosslayer.output.record import Measure


class DiagnosisRecord(BaseModel):
    """What `record.json` of a diagnosis holds; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: str = Field(alias="schema", pattern="^crosslayer/diagnosis/1$")
    model: dict[str, Any]
    settings: dict[str, Any]
    measures: dict[str, Measure]
    importance_by_position: dict[str, Any]
    top_tokens: list[list[dict[str, Any]]]
    position_table: dict[str, Any] | None
    verdict: dict[str, Any]
    seconds: float
    environment: dict[str, Any]

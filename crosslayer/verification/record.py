"""What `record.json` of a verification holds."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class CheckRow(BaseModel):
    """One row of a verification; `difference` is None where none was measured."""

    model_config = ConfigDict(extra="forbid")
    name: str
    dtype: str | None
    status: str = Field(pattern="^(PASS|FAIL|NOT APPLICABLE)$")
    difference: float | None
    tolerance: float | None
    reason: str


class VerifyRecord(BaseModel):
    """What `record.json` of a verification holds."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: str = Field(alias="schema", pattern="^crosslayer/verify/1$")
    model: str
    command: str
    checks: list[CheckRow]
    seconds: float
    environment: dict[str, Any]

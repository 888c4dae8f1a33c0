"""What `record.json` of a retrofit holds."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class RetrofitRecord(BaseModel):
    """What `record.json` of a retrofit holds; `damage` by domain, the worst that nothing was fitted to first."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: str = Field(alias="schema", pattern="^crosslayer/retrofit/2$")
    model: dict[str, Any]
    methods: list[dict[str, Any]]
    plan: dict[str, list[int | None]]
    choice: dict[str, Any]
    weights: dict[str, list[str]]
    calibration: dict[str, Any]
    cache: dict[str, float]
    damage: dict[str, Any]
    settings: dict[str, Any]
    seconds: dict[str, float]
    environment: dict[str, Any]

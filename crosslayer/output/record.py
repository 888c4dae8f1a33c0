"""The schema of every result."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from crosslayer.output.folder import check_target as check_target
from crosslayer.output.folder import whole_folder as whole_folder

CLEAR = 0.9  # the coverage from which an interval of a bench decides: 5 pairs


class Measure(BaseModel):
    """A measure by layer: mean over n sequences and 95 % Student-t interval, a pair [low, high] for each entry."""

    model_config = ConfigDict(extra="forbid")
    mean: list[Any]
    ci95: list[Any] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)


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


class Scalar(BaseModel):
    """A measure that has no layers: mean over n sequences and 95 % Student-t interval."""

    model_config = ConfigDict(extra="forbid")
    mean: float
    ci95: list[float] | None
    n: int = Field(ge=1)


class ByLayer(BaseModel):
    """A measure of one position by layer, before and under an intervention, with the paired difference."""

    model_config = ConfigDict(extra="forbid")
    before: Measure
    after: Measure
    difference: Measure


class LossBehind(BaseModel):
    """Cross-entropy of what the tokens behind a position predict, in nats a token."""

    model_config = ConfigDict(extra="forbid")
    before: Scalar
    after: Scalar
    difference: Scalar


class Place(BaseModel):
    """What was measured at one position; `loss_behind` is None for encoders."""

    model_config = ConfigDict(extra="forbid")
    position: int
    attention_received: ByLayer
    hidden_norm_ratio: ByLayer
    value_norm_ratio: ByLayer
    mlp_l1_l2: ByLayer | None
    loss_behind: LossBehind | None


class OtherPlace(Place):
    """A position that the record is not about."""

    role: str = Field(pattern="^(intervened|first token|left alone)$")


class InterventionRecord(Place):
    """What `record.json` of an intervention holds; its own measures are of the first position intervened on."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: str = Field(alias="schema", pattern="^crosslayer/intervention/1$")
    model: dict[str, Any]
    settings: dict[str, Any]
    interventions: list[dict[str, Any]] = Field(min_length=1)
    others: list[OtherPlace]
    attention_by_position: dict[str, Any]
    scan: list[dict[str, Any]]
    controls: list[dict[str, Any]]
    seconds: float
    environment: dict[str, Any]


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


def dumps(record: dict[str, Any]) -> str:
    """Write a record as JSON; a NaN or an infinity is an error, never a value."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)

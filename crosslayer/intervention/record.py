"""What `record.json` of an intervention holds."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from crosslayer.output.record import Measure


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

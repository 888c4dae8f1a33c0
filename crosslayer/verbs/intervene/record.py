"""What `record.json` of an intervention holds.

Shapes: L layers. A measure by layer holds None where a layer has no such sublayer.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from crosslayer.output.record import Frozen, Measure, PositionBins, typed_command
from crosslayer.verbs.intervene.kinds import Entry

SCHEMA = "crosslayer/intervention/2"
Role = Literal["intervened", "first token", "left alone"]
Ends = Annotated[list[float | None], Field(min_length=2, max_length=2)]  # of an interval


class LayerMeasure(Measure):
    """A measure by layer, (L,): mean over n sequences, and the ends of its 95 % Student-t interval."""

    mean: list[float | None] = Field(min_length=1)
    ci95: list[Ends] | None = Field(description="None for a single sequence")


class Scalar(Frozen):
    """A measure that has no layers: mean over n sequences and 95 % Student-t interval."""

    mean: float
    ci95: list[float] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)


class Change(Frozen):
    """A measure by layer before and under an intervention, with the paired difference over sequences."""

    before: LayerMeasure
    after: LayerMeasure
    difference: LayerMeasure

    @property
    def means(self) -> np.ndarray:
        """The means before and after as float64, (2, L), NaN where a layer has no such sublayer."""
        return np.stack([self.before.array, self.after.array])


class LossChange(Frozen):
    """Cross-entropy of what the tokens behind a position predict, in nats a token, before and after."""

    before: Scalar
    after: Scalar
    difference: Scalar


class Place(Frozen):
    """What was measured at a position, and what the position is to the record."""

    position: int = Field(ge=0)
    role: Role
    attention_received: Change
    hidden_norm_ratio: Change
    value_norm_ratio: Change
    mlp_l1_l2: Change | None = Field(description="None where no layer has an MLP of its own")
    loss_behind: LossChange | None = Field(description="None for encoders, and for positions before all that changes")

    @property
    def changes(self) -> list[Change]:
        """Everything that was measured by layer."""
        changes = [self.attention_received, self.hidden_norm_ratio, self.value_norm_ratio]
        return changes if self.mlp_l1_l2 is None else [*changes, self.mlp_l1_l2]


class Reading(Frozen):
    """The measures of a position by layer, over the probes, in a single state of the model."""

    attention_received: LayerMeasure
    hidden_norm_ratio: LayerMeasure
    value_norm_ratio: LayerMeasure
    mlp_l1_l2: LayerMeasure | None

    @property
    def measures(self) -> list[LayerMeasure]:
        """Everything that was measured by layer."""
        measures = [self.attention_received, self.hidden_norm_ratio, self.value_norm_ratio]
        return measures if self.mlp_l1_l2 is None else [*measures, self.mlp_l1_l2]


class Trial(Reading):
    """A reading of the main position while the interventions act in some layers only."""

    layers: list[int]


class Control(Frozen):
    """The interventions elsewhere, or with random content, and what they do to their own first position."""

    interventions: list[Entry] = Field(min_length=1)
    position: int = Field(ge=0)
    before: Reading
    after: Reading


class AttentionByPosition(Frozen):
    """Attention received by all positions, by layer and bin of positions, before and after."""

    before: PositionBins
    after: PositionBins


class ModelFacts(Frozen):
    """What the record says of the model itself."""

    class_: str = Field(alias="class")
    type: str
    layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    causal: bool


class Settings(Frozen):
    """What was run: `model` and `text` as a result calls them, how the text was cut, and the seed of all that is drawn.

    For token ids `text` and `bos` are None and `documents` is empty.
    """

    model: str
    text: str | None
    documents: list[int] = Field(description="number of each sequence's document, below 0 for several")
    bos: str | None
    sequences: int = Field(ge=1)
    length: int = Field(ge=2)
    probes: int = Field(ge=1, description="sequences of scan and controls, the first of all")
    seed: int
    command: str | None = typed_command()

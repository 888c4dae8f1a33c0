"""What `record.json` of an intervention holds.

Shapes: L layers. A measure by layer holds None where a layer has no such sublayer.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from crosslayer.output.record import Frozen, Measure, PositionBins
from crosslayer.verbs.diagnose.record import ProbedModel, TextSettings
from crosslayer.verbs.intervene.kinds import Entry

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


class Reading(Frozen):
    """The measures of a position by layer, over the probes, in a single state of the model."""

    attention_received: LayerMeasure
    hidden_norm_ratio: LayerMeasure
    value_norm_ratio: LayerMeasure
    mlp_l1_l2: LayerMeasure | None = Field(default=None, description="None where no layer has an MLP of its own")


class Place(Frozen):
    """What was measured at a position, and what the position is to the record."""

    position: int = Field(ge=0)
    role: Role
    attention_received: Change
    hidden_norm_ratio: Change
    value_norm_ratio: Change
    mlp_l1_l2: Change | None = Field(default=None, description="None where no layer has an MLP of its own")
    loss_behind: LossChange | None = Field(description="None for encoders, and for positions before all that changes")


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


class IntervenedModel(ProbedModel):
    """A model that was intervened on."""

    causal: bool


class Settings(TextSettings):
    """What was run; `seed` is that of all that is drawn, also for token ids."""

    probes: int = Field(ge=1, description="sequences of scan and controls, the first of all")

"""The result of an intervention: the content of `record.json`.

Shapes: L layers. A measure by layer is None where a layer has no such sublayer.
"""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.record import Frozen, Measure, PositionBins
from crosslayer.output.result import Result
from crosslayer.verbs.diagnose.result import ProbedModel, TextSettings
from crosslayer.verbs.intervene.kinds import Entry

Role = Literal["intervened", "first token", "left alone"]


class Scalar(Frozen):
    """A measure without layers: mean over n sequences and 95% Student-t interval."""

    mean: float
    ci95: list[float] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)


class Change(Frozen):
    """A measure by layer before and after an intervention, with the paired difference over sequences."""

    before: Measure
    after: Measure
    difference: Measure

    @property
    def means(self) -> np.ndarray:
        """The means before and after, (2, L), float64; NaN where a layer has no such sublayer."""
        return np.stack([self.before.array, self.after.array])


class LossChange(Frozen):
    """Cross-entropy of the predictions of the tokens after a position, in nats per token, before and after."""

    before: Scalar
    after: Scalar
    difference: Scalar


class Reading(Frozen):
    """The measures of a position by layer, over the probe sequences, before or after an intervention."""

    attention_received: Measure
    hidden_norm_ratio: Measure
    value_norm_ratio: Measure
    mlp_l1_l2: Measure | None = Field(default=None, description="None if no layer has a separate MLP")


class PositionChange(Frozen):
    """The change at a position, and the role of the position: changed, first token, or control."""

    position: int = Field(ge=0)
    role: Role
    attention_received: Change
    hidden_norm_ratio: Change
    value_norm_ratio: Change
    mlp_l1_l2: Change | None = Field(default=None, description="None if no layer has a separate MLP")
    loss_behind: LossChange | None = Field(
        description="None for encoders, and for positions before the first one intervened on"
    )


class Trial(Reading):
    """A reading of the main position with the interventions in some layers only."""

    layers: list[int]


class Control(Frozen):
    """The same interventions at other positions or with random content, and their effect at their first position."""

    interventions: list[Entry] = Field(min_length=1)
    position: int = Field(ge=0)
    before: Reading
    after: Reading


class AttentionByPosition(Frozen):
    """Attention that all positions receive, by layer and bin of positions, before and after."""

    before: PositionBins
    after: PositionBins


class IntervenedModel(ProbedModel):
    """The model under intervention."""

    causal: bool


class Settings(TextSettings):
    """The settings of the run; `seed` is used for everything random, also with token ids."""

    probes: int = Field(ge=1, description="number of sequences, the first ones, on which scan and controls run")


class Effect(Result):
    """What `crosslayer.intervene` returns: all measures before and after the interventions, with a page.

    Arrays are means over sequences in float64 at the main position, the first position of the first intervention.
    `positions` has the other positions, with intervals; each `Change` there has its `means` as an array.

    Shapes: L layers; 2 stands for before and after.
    """

    schema_: Literal["crosslayer/intervene/4"] = Field(default="crosslayer/intervene/4", alias="schema")
    model: IntervenedModel
    settings: Settings
    interventions: list[Entry] = Field(min_length=1)
    positions: list[PositionChange] = Field(min_length=1)
    attention_by_position: AttentionByPosition
    scan: list[Trial]
    controls: list[Control]
    seconds: float

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        """Raise if a measure does not have one entry for each layer."""
        models: list[Any] = [*self.positions, *self.scan]
        models += [reading for control in self.controls for reading in (control.before, control.after)]
        models += [value for position in self.positions for _, value in position if isinstance(value, Change)]
        for name, measure in (field for model in models for field in model):
            if isinstance(measure, Measure):
                measure.check(name, (self.model.layers,))
        return self

    @property
    def main(self) -> PositionChange:
        """The change at the main position, the first of the first intervention, with intervals."""
        return self.positions[0]

    @property
    def attention_received(self) -> np.ndarray:
        """Mean attention from the rows that may see the position, (2, L), 0 to 1; NaN without attention."""
        return self.main.attention_received.means

    @property
    def hidden_norm_ratio(self) -> np.ndarray:
        """Norm of the hidden state at the input of a layer over the median of the other tokens, (2, L), no unit."""
        return self.main.hidden_norm_ratio.means

    @property
    def value_norm_ratio(self) -> np.ndarray:
        """Norm of the values over the median of the other tokens, (2, L), no unit; NaN without attention."""
        return self.main.value_norm_ratio.means

    @property
    def mlp_l1_l2(self) -> np.ndarray | None:
        """L1 over L2 norm of the MLP's output, (2, L), 1 to √C; None if no layer has a separate MLP."""
        return None if self.main.mlp_l1_l2 is None else self.main.mlp_l1_l2.means

    @property
    def loss_behind(self) -> np.ndarray | None:
        """Mean cross-entropy of the predictions of later tokens, (2,), nats per token; None for encoders."""
        loss = self.main.loss_behind
        return None if loss is None else np.array([loss.before.mean, loss.after.mean])

    def headline(self) -> dict[str, Any]:
        """Return the few numbers that the command line prints last: the change at the main position."""
        return self.sibling("page").headline(self)

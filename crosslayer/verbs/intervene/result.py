"""The result of an intervention: what `record.json` holds.

Shapes: L layers. A measure by layer holds None where a layer has no such sublayer.
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
    """A measure that has no layers: mean over n sequences and 95 % Student-t interval."""

    mean: float
    ci95: list[float] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)


class Change(Frozen):
    """A measure by layer before and under an intervention, with the paired difference over sequences."""

    before: Measure
    after: Measure
    difference: Measure

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

    attention_received: Measure
    hidden_norm_ratio: Measure
    value_norm_ratio: Measure
    mlp_l1_l2: Measure | None = Field(default=None, description="None where no layer has an MLP of its own")


class PositionChange(Frozen):
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


class Effect(Result):
    """What `crosslayer.intervene` returns: everything that was measured before and under interventions, with its page.

    Arrays are means over sequences in float64, at the main position: the first position of the first intervention. What
    was measured at other positions is in `positions`, with intervals; each `Change` there has its `means` as an array.

    Shapes: L layers; 2 stands for before and under the interventions.
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
        """Refuse measures that do not have an entry for each layer."""
        parts: list[Any] = [*self.positions, *self.scan]
        parts += [side for control in self.controls for side in (control.before, control.after)]
        parts += [value for place in self.positions for _, value in place if isinstance(value, Change)]
        for name, measure in (named for part in parts for named in part):
            if isinstance(measure, Measure):
                measure.check(name, (self.model.layers,))
        return self

    @property
    def main(self) -> PositionChange:
        """What was measured at the first position of the first intervention, with intervals."""
        return self.positions[0]

    @property
    def attention_received(self) -> np.ndarray:
        """Share of the attention of the rows that may see the position, (2, L), 0 to 1; NaN without attention."""
        return self.main.attention_received.means

    @property
    def hidden_norm_ratio(self) -> np.ndarray:
        """Norm of the hidden state that enters a layer over the median of the other tokens, (2, L), without unit."""
        return self.main.hidden_norm_ratio.means

    @property
    def value_norm_ratio(self) -> np.ndarray:
        """Norm of the value states over the median of the other tokens, (2, L), without unit; NaN without attention."""
        return self.main.value_norm_ratio.means

    @property
    def mlp_l1_l2(self) -> np.ndarray | None:
        """L1 over L2 norm of what the MLP adds, (2, L), 1 to √C; None where no layer has an MLP of its own."""
        return None if self.main.mlp_l1_l2 is None else self.main.mlp_l1_l2.means

    @property
    def loss_behind(self) -> np.ndarray | None:
        """Mean cross-entropy of what the tokens behind the position predict, (2,), nats a token; None for encoders."""
        loss = self.main.loss_behind
        return None if loss is None else np.array([loss.before.mean, loss.after.mean])

    @property
    def attention_by_bin(self) -> np.ndarray:
        """Attention received by a position, a mean in each bin, (2, L, bins), 0 to 1; `edges` begin the bins."""
        sides = self.attention_by_position
        return np.array([sides.before.mean, sides.after.mean], dtype=float)

    @property
    def edges(self) -> np.ndarray:
        """First position of each bin of `attention_by_bin`, (bins,), tokens."""
        return np.array(self.attention_by_position.before.edges)

    @property
    def scan_attention(self) -> np.ndarray:
        """Attention received while the interventions act in the layers of each `scan` only, (groups, L), 0 to 1."""
        layers = self.model.layers
        return np.array([trial.attention_received.mean for trial in self.scan], dtype=float).reshape(-1, layers)

    @property
    def control_attention(self) -> np.ndarray:
        """Attention received by the position of each of `controls`, (controls, 2, L), 0 to 1."""
        readings = [side for control in self.controls for side in (control.before, control.after)]
        means = [reading.attention_received.mean for reading in readings]
        return np.array(means, dtype=float).reshape(-1, 2, self.model.layers)

    def headline(self) -> dict[str, Any]:
        """Return the figures of the main position: over all layers, before and after, and the loss behind it."""
        return self.sibling("page").headline(self)

"""The result of an intervention: the content of `record.json`.

Shapes: L layers. A measure by layer is None where a layer has no such sublayer.
"""

from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.formatting import counted
from crosslayer.output.record import Frozen, Measure, PositionBins
from crosslayer.output.result import Result
from crosslayer.verbs.diagnose.curves import highest, lowest, mean_over_layers
from crosslayer.verbs.diagnose.result import ProbedModel, TextSettings
from crosslayer.verbs.intervene.kinds import Entry, to_entry

Role = Literal["intervened", "first token", "left alone"]
# Sequences, the first ones, on which scan and controls run. On a single one a scan misleads: how much each range of
# layers does differs between texts.
PROBED = 2


class Change(Frozen):
    """A measure before and after an intervention, with the paired difference over sequences."""

    before: Measure
    after: Measure
    difference: Measure


class Reading(Frozen):
    """The measures of a position by layer, over the first `PROBED` sequences, before or after an intervention."""

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
    attention_by_head: Change = Field(description="`attention_received` of each head, (L, H)")
    loss_behind: Change | None = Field(
        default=None,
        description="cross-entropy of the predictions of later tokens, nats per token; None for encoders, and for "
        "positions before the first one intervened on",
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


class HeadRow(Frozen):
    """What the last token of a sequence attends to in one head, by position, before and after; mean over sequences."""

    layer: int = Field(ge=0)
    head: int = Field(ge=0)
    before: list[float]
    after: list[float]


class IntervenedModel(ProbedModel):
    """The model under intervention."""

    causal: bool


class Settings(TextSettings):
    """The settings of the run; `seed` is used for everything random, also with token ids."""

    @property
    def probed(self) -> str:
        """On how many sequences scan and controls ran; empty if on all of them."""
        return f", {counted(PROBED, 'sequence')}" if self.sequences > PROBED else ""


class Effect(Result):
    """What `crosslayer.intervene` returns: all measures before and after the interventions, with a page.

    Arrays are means over sequences in float64 at the main position, the first position of the first intervention.
    `positions` has the other positions, with intervals; each `Change` there has `before` and `after`.

    Shapes: L layers; 2 stands for before and after.
    """

    schema_: Literal["crosslayer/intervene/7"] = Field(default="crosslayer/intervene/7", alias="schema")
    model: IntervenedModel
    settings: Settings
    interventions: list[Entry] = Field(min_length=1)
    positions: list[PositionChange] = Field(min_length=1)
    attention_by_position: AttentionByPosition
    last_row_by_position: AttentionByPosition = Field(description="attention that the last token gives to each")
    last_row_of_head: HeadRow = Field(
        description="of the head in which the last token's attention to the main position changes most"
    )
    scan: list[Trial]
    controls: list[Control]
    seconds: float

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        """Raise if a measure does not have one entry for each layer."""
        models: list[tuple[str, Any]] = [("", trial) for trial in self.scan]
        models += [("", reading) for control in self.controls for reading in (control.before, control.after)]
        models += [pair for position in self.positions for pair in position if isinstance(pair[1], Change)]
        for of, name, measure in ((of, *field) for of, model in models for field in model):
            if isinstance(measure, Measure):
                shapes = {"loss_behind": (), "attention_by_head": (self.model.layers, *measure.array().shape[1:2])}
                measure.check(name, shapes.get(of, (self.model.layers,)))
        return self

    @property
    def main(self) -> PositionChange:
        """The change at the main position, the first of the first intervention, with intervals."""
        return self.positions[0]

    @property
    def first_token(self) -> PositionChange | None:
        """The change at the first token; None if the interventions change it themselves."""
        return next((position for position in self.positions if position.role == "first token"), None)

    def __getattr__(self, name: str) -> Any:
        """Return the means of a measure at the main position, before and after: (2, L), or (2,) for `loss_behind`.

        NaN where a layer has no such sublayer; None if it was not measured.
        """
        if name not in (*Reading.model_fields, "attention_by_head", "loss_behind"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        change: Change | None = getattr(self.main, name)
        return None if change is None else np.stack([change.before.array(), change.after.array()])

    def headline(self) -> dict[str, Any]:
        """Return the few numbers that the command line prints last: the change at the main position."""

        def both(change: Change, digits: int, figure: Callable[[Measure], float]) -> dict[str, float | None]:
            """Return a number before and after; None if no layer has the measure."""
            values = {"before": figure(change.before), "after": figure(change.after)}
            return {when: None if np.isnan(value) else round(value, digits) for when, value in values.items()}

        main, loss = self.main, self.main.loss_behind
        return {
            "model": self.model.name,
            "interventions": [to_entry(intervention) for intervention in self.interventions],
            "position": main.position,
            "attention_received": both(main.attention_received, 5, mean_over_layers),
            "hidden_norm_ratio_max": both(main.hidden_norm_ratio, 2, lambda ratio: highest(ratio)[1]),
            "value_norm_ratio_min": both(main.value_norm_ratio, 3, lambda ratio: lowest(ratio)[1]),
            "loss_behind": None if loss is None else {name: round(scalar.mean, 4) for name, scalar in loss},
            "seconds": round(self.seconds, 2),
        }

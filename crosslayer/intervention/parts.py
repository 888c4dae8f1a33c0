"""The parts of a record, from readings: means over sequences, intervals, and paired differences.

Shapes: N sequences, L layers, P watched positions.
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from crosslayer.intervention.readings import Sample
from crosslayer.intervention.record import Change, LossChange, ModelFacts, Place, Reading, Role, Scalar, Trial
from crosslayer.output.summary import measure, summarise
from crosslayer.probe.intercept import layer_stack


def facts(model: PreTrainedModel, causal: bool) -> ModelFacts:
    """Return what the record says of the model itself."""
    return ModelFacts(
        **{"class": type(model).__name__},
        type=model.config.model_type,
        layers=len(layer_stack(model)),
        hidden_size=model.config.get_text_config().hidden_size,
        causal=causal,
    )


def place(position: int, role: Role, index: int, before: Sample, after: Sample) -> Place:
    """Return what was measured at a watched position, by its index among them."""
    mlp = None
    if before.mlp_l1_l2 is not None and after.mlp_l1_l2 is not None:
        mlp = change(before.mlp_l1_l2[..., index], after.mlp_l1_l2[..., index])
    return Place(
        position=position,
        role=role,
        attention_received=change(before.attention_received[..., index], after.attention_received[..., index]),
        hidden_norm_ratio=change(before.hidden_norm_ratio[..., index], after.hidden_norm_ratio[..., index]),
        value_norm_ratio=change(before.value_norm_ratio[..., index], after.value_norm_ratio[..., index]),
        mlp_l1_l2=mlp,
        loss_behind=loss_change(before.loss_behind, after.loss_behind, index),
    )


def change(before: np.ndarray, after: np.ndarray) -> Change:
    """Summarise readings by layer, (N, L) each, and their paired difference."""
    return Change(before=measure(before), after=measure(after), difference=measure(after - before))


def loss_change(before: np.ndarray | None, after: np.ndarray | None, index: int) -> LossChange | None:
    """Summarise the losses behind a position, of (N, P) each, and their paired difference."""
    if before is None or after is None or np.isnan(before[:, index]).all():
        return None
    start, end = before[:, index], after[:, index]
    sides = {"before": start, "after": end, "difference": end - start}
    return LossChange(**{side: Scalar.model_validate(summarise(losses)) for side, losses in sides.items()})


def reading(sample: Sample, index: int, count: int | None = None) -> Reading:
    """Summarise the readings of a watched position, by its index among them, over the first `count` sequences."""
    mlp = sample.mlp_l1_l2
    return Reading(
        attention_received=measure(sample.attention_received[:count, :, index]),
        hidden_norm_ratio=measure(sample.hidden_norm_ratio[:count, :, index]),
        value_norm_ratio=measure(sample.value_norm_ratio[:count, :, index]),
        mlp_l1_l2=None if mlp is None else measure(mlp[:count, :, index]),
    )


def trial(layers: Sequence[int], readings: Reading) -> Trial:
    """Return the readings of the main position while the interventions act in these layers only."""
    return Trial(layers=list(layers), **dict(readings))

"""The parts of a record, from readings: means over sequences, intervals, and paired differences.

Shapes: N sequences, L layers, P watched positions.
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from crosslayer.output.summary import summarise
from crosslayer.probe.intercept import layer_stack
from crosslayer.verbs.intervene.readings import Sample
from crosslayer.verbs.intervene.record import (
    Change,
    LayerMeasure,
    LossChange,
    ModelFacts,
    Place,
    Reading,
    Role,
    Scalar,
    Trial,
)


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


def by_layer(sample: np.ndarray) -> LayerMeasure:
    """Summarise readings by layer, (N, L)."""
    return LayerMeasure.model_validate(summarise(sample))


def change(before: np.ndarray, after: np.ndarray) -> Change:
    """Summarise readings by layer, (N, L) each, and their paired difference."""
    return Change(before=by_layer(before), after=by_layer(after), difference=by_layer(after - before))


def loss_change(before: np.ndarray | None, after: np.ndarray | None, index: int) -> LossChange | None:
    """Summarise the losses behind a position, of (N, P) each, and their paired difference.

    Raises:
        ValueError: a loss is not finite.

    """
    if before is None or after is None or np.isnan(before[:, index]).all():
        return None
    start, end = before[:, index], after[:, index]
    if not np.isfinite([start, end]).all():
        raise ValueError("the loss is not finite; try another dtype, such as float32")
    sides = {"before": start, "after": end, "difference": end - start}
    return LossChange(**{side: Scalar.model_validate(summarise(losses)) for side, losses in sides.items()})


def reading(sample: Sample, index: int, count: int | None = None) -> Reading:
    """Summarise the readings of a watched position, by its index among them, over the first `count` sequences."""
    mlp = sample.mlp_l1_l2
    return Reading(
        attention_received=by_layer(sample.attention_received[:count, :, index]),
        hidden_norm_ratio=by_layer(sample.hidden_norm_ratio[:count, :, index]),
        value_norm_ratio=by_layer(sample.value_norm_ratio[:count, :, index]),
        mlp_l1_l2=None if mlp is None else by_layer(mlp[:count, :, index]),
    )


def trial(layers: Sequence[int], readings: Reading) -> Trial:
    """Return the readings of the main position while the interventions act in these layers only."""
    return Trial(layers=list(layers), **dict(readings))

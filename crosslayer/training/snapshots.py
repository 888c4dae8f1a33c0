"""Snapshots during training: sinks, norms and gradients on a few held-out windows, for every layer.

Data flow: windows → measures of each → means in the log → `Snapshot`s in the record.
Shapes: N windows, T tokens, L layers.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.probe.depth import depth_mixing, output_norms
from crosslayer.probe.model import evaluating, no_cache
from crosslayer.training.attention import readable_masks
from crosslayer.training.record import DepthMixing, Snapshot

MEASURES = tuple(name for name in Snapshot.model_fields if name != "step")


@torch.no_grad()
def snapshot(
    model: PreTrainedModel, windows: Tensor, measure: Callable[[PreTrainedModel, Tensor], dict[str, np.ndarray]]
) -> dict[str, float]:
    """Return the mean over windows (N, T) of each measure of each layer, as "snapshot_sink_rate_layer_0" and so on.

    `measure` gives measures (L,) of a window by name, in addition to norms of outputs and gradients. A measure is NaN
    where a layer lacks the sublayer.
    """
    with evaluating(model), readable_masks(model):
        measured = [{**measure(model, window), **output_norms(model, window)} for window in windows]
    means = {name: np.mean([measures[name] for measures in measured], axis=0) for name in MEASURES}  # (L,) each
    return {
        f"snapshot_{name}_layer_{layer}": float(value) for name in MEASURES for layer, value in enumerate(means[name])
    }


@torch.no_grad()
def depth_mixing_of(model: PreTrainedModel, windows: Tensor | None) -> DepthMixing | None:
    """Return what sublayers read of earlier ones, mean over windows (N, T); None without windows, or if unknown."""
    tables = []
    readers: list[str] = []
    for window in () if windows is None else windows:
        with evaluating(model), depth_mixing(model) as mixing:
            model(input_ids=window[None].to(model.device), **no_cache(model))
        tables.append(mixing.table())
        readers = mixing.readers
    if not tables or any(table is None for table in tables):
        return None
    weights = [[None if np.isnan(weight) else float(weight) for weight in row] for row in np.mean(tables, axis=0)]
    return DepthMixing(readers=readers, weights=weights)

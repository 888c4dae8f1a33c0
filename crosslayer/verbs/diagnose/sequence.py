"""Every measure of every layer in a single forward pass over a sequence.

Flows: tokens → visited attention calls and residual streams → measures. The forward pass keeps queries and keys; the
maps are computed from them afterwards, block by block (`probe/maps.py`).

Shapes: L layers of the stack, T tokens, C hidden, H heads, D head size. Measures are (L, …), NaN where a layer has no
such sublayer.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.probe import measures as m
from crosslayer.probe.depth import DepthReads, depth_reads
from crosslayer.probe.entries import over_tokens
from crosslayer.probe.intercept import AttentionCall, layer_stack, no_cache, visited
from crosslayer.probe.maps import map_sums
from crosslayer.probe.shapes import LayerShape
from crosslayer.probe.stream import LayerStream, mean_stream, streams
from crosslayer.verbs.diagnose.cross_layer import CrossLayerCosines

SINK_THRESHOLD = 0.3  # of a head's mean attention to token 0, for the sink rate
VALUE_MEASURES = ("value_norm_ratio", "value_spectrum")
STREAM_MEASURES = (
    "hidden_norm_ratio",
    "stream_norm",
    "token_similarity",
    "layer_io_similarity",
    "attention_io_similarity",
    "mlp_l1_l2",
    "mlp_l1_l2_others",
)
BY_STREAM = STREAM_MEASURES[:5]  # measured of each residual stream as well, where there are several


@dataclass(frozen=True)
class SequenceMeasures:
    """The measures of a sequence in float64.

    Attributes:
        measures: by name, (L,), (L, L) or (L, k).
        cross_layer: by name, (L,); empty where it was not asked for.
        by_stream: by name, (L, N) of N residual streams; empty where there is a single stream.
        shares: each token's share of a layer's attention, a' (L, T).
        shapes: of each layer's attention, None where it has none.
        over_depth: whether layers read by attention over depth.
        depth: who reads from which sources over depth, if the model does so.

    """

    measures: dict[str, np.ndarray]
    cross_layer: dict[str, np.ndarray]
    by_stream: dict[str, np.ndarray]
    shares: np.ndarray
    shapes: list[LayerShape | None]
    over_depth: bool
    depth: DepthReads


def measure_sequence(model: PreTrainedModel, ids: Tensor, cross_layer: bool = False) -> SequenceMeasures:
    """Run the model over token ids (T,) and measure every layer.

    Raises:
        ValueError: the model cannot be probed, a layer attends twice, hidden states are not finite, or `cross_layer` is
            asked of scores that are capped, biased or have sinks.

    """
    look = _Look(len(layer_stack(model)), CrossLayerCosines() if cross_layer else None)
    device = next(model.parameters()).device
    with visited(model, look.see_attention), streams(model, look.see_stream), depth_reads(model) as depth:
        model.base_model(input_ids=ids[None].to(device), **no_cache(model))  # the logits are not needed
    return look.result(LayerShape.read(look.calls, model.config.get_text_config(), look.layers), depth)


class _Look:
    """Takes what the layers show during a forward pass; tensors that are measured at once are not kept."""

    def __init__(self, layers: int, cosines: CrossLayerCosines | None):
        self.layers, self.cosines = layers, cosines
        self.calls: list[AttentionCall] = []
        self.by_layer: dict[str, dict[int, Tensor]] = {name: {} for name in STREAM_MEASURES + VALUE_MEASURES}
        self.by_stream: dict[str, dict[int, Tensor]] = {name: {} for name in BY_STREAM}
        self.over_depth = False

    def see_attention(self, call: AttentionCall) -> None:
        """Measure the values, and keep queries and keys."""
        if any(seen.layer == call.layer for seen in self.calls):
            raise ValueError(
                f"layer {call.layer} attends twice (cross-attention?); only self-attention can be diagnosed"
            )
        call = over_tokens(call)
        value = call.value[0]  # (H_kv, T, D)
        self._keep("value_norm_ratio", call.layer, m.over_median(m.value_norms(value)))
        self._keep("value_spectrum", call.layer, m.value_spectrum(value))
        if self.cosines is not None:
            self.cosines.see(call)
        self.calls.append(replace(call, value=call.value[:, :, :0].clone()))

    def see_stream(self, stream: LayerStream) -> None:
        """Measure the residual stream around a layer."""
        last = stream.entering if stream.leaving is None else stream.leaving
        if not last.isfinite().all():
            kind = str(last.dtype).removeprefix("torch.")
            raise ValueError(f"layer {stream.layer} produces hidden states that are not finite in {kind}; try float32")
        self.over_depth = self.over_depth or stream.over_depth
        for name, measure in _of_streams(stream).items():
            self._keep(name, stream.layer, measure)
        if len(stream.entering) > 1:
            each = [_of_streams(stream, number) for number in range(len(stream.entering))]
            for name in each[0]:
                self.by_stream[name][stream.layer] = torch.stack([measures[name] for measures in each])  # (N,)
        if stream.mlp_update is not None:
            flatness = m.l1_over_l2(stream.mlp_update)  # (T,)
            self._keep("mlp_l1_l2", stream.layer, flatness[0])
            self._keep("mlp_l1_l2_others", stream.layer, flatness[1:].quantile(0.5))

    def _keep(self, name: str, layer: int, measure: Tensor) -> None:
        self.by_layer[name][layer] = measure

    def result(self, shapes: list[LayerShape | None], depth: DepthReads) -> SequenceMeasures:
        """Return everything, with the measures of the maps, which are computed here."""
        self.calls.sort(key=lambda call: call.layer)
        with_attention = [call.layer for call in self.calls]
        size = self.calls[0].key.shape[2]
        sums = map_sums(self.calls)
        shares = m.importance(sums.columns)  # (L, T) of the layers with attention, as all that follows
        sinking = (sums.first_by_head / size > SINK_THRESHOLD).double()  # (L, H); rows that see token 0: all
        sinking[sums.first_by_head.isnan()] = torch.nan
        of_maps = {
            "first_token_share": shares[:, 0],
            "entropy": m.entropy(shares),
            "sink_rate": sinking.nanmean(dim=-1),
            "top_importance": m.top_importance(shares),
        }
        of_pairs = {
            "map_similarity": m.gram_cosine(sums.gram),
            "map_similarity_per_head": m.gram_cosine(sums.gram_by_head).nanmean(dim=0),
            "map_similarity_without_first": m.gram_cosine(sums.gram_without_first),
        }
        measures = {name: self._spread(by_layer) for name, by_layer in self.by_layer.items()}
        for name, rows in of_maps.items():
            measures[name] = self._spread(dict(zip(with_attention, rows, strict=True)))
        for name, matrix in of_pairs.items():
            measures[name] = np.full((self.layers, self.layers), np.nan)
            measures[name][np.ix_(with_attention, with_attention)] = matrix.cpu().numpy()
        cosines = {} if self.cosines is None else self.cosines.by_form
        return SequenceMeasures(
            measures=measures,
            by_stream={name: self._spread(by_layer) for name, by_layer in self.by_stream.items() if by_layer},
            over_depth=self.over_depth,
            cross_layer={name: self._spread(by_layer) for name, by_layer in cosines.items()},
            shares=self._spread(dict(zip(with_attention, shares, strict=True))),
            shapes=shapes,
            depth=depth,
        )

    def _spread(self, by_layer: dict[int, Tensor]) -> np.ndarray:
        """Return an array over all layers, (L,) of scalars and (L, k) of vectors, NaN where a layer has none."""
        width = max((row.numel() for row in by_layer.values()), default=1)
        full = np.full((self.layers, width), np.nan)
        for layer, row in by_layer.items():
            full[layer, : row.numel()] = row.double().cpu().numpy()
        scalars = all(row.dim() == 0 for row in by_layer.values())
        return full[:, 0] if scalars else full


def _of_streams(stream: LayerStream, number: int | None = None) -> dict[str, Tensor]:
    """Return the measures of a residual stream, or of the mean of all, by name."""

    def pick(streams: Tensor) -> Tensor:  # (N, T, C) → (T, C)
        return mean_stream(streams) if number is None else streams[number]

    before, around = pick(stream.entering), stream.around_attention
    norms = m.hidden_norms(before)  # (T,)
    measures = {
        "hidden_norm_ratio": m.over_median(norms),
        "stream_norm": norms.mean(),
        "token_similarity": m.token_similarity(before),
    }
    if stream.leaving is not None:
        measures["layer_io_similarity"] = m.mean_cosine(before, pick(stream.leaving))
    if around is not None and (number is None or len(around[0]) > 1):
        measures["attention_io_similarity"] = m.mean_cosine(pick(around[0]), pick(around[1]))
    return measures

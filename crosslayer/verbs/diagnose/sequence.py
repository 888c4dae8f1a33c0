"""Every measure of every layer, in one forward pass over a sequence.

Flows: tokens → intercepted attention calls and residual streams → measures. The forward pass keeps queries and keys;
the attention maps are computed from them afterwards, block by block (`probe/maps.py`).

Shapes: L layers of the stack, B batch, T tokens, C hidden, H heads, H_kv key-value heads, D head size. Measures are
(L, …), NaN if a layer has no such sublayer.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.probe import measures as m
from crosslayer.probe.depth import DepthMixing, depth_mixing
from crosslayer.probe.gates import output_gates
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.maps import BLOCKED, is_causal, map_sums, over_tokens
from crosslayer.probe.model import layer_stack, no_cache
from crosslayer.probe.shapes import LayerShape
from crosslayer.probe.stream import LayerStream, mean_stream, streams
from crosslayer.verbs.diagnose.result import ByStream, Measures

SOURCES = ("previous", "first")
FORMS = ("current", "identity")
SINK_THRESHOLD = 0.3  # mean attention to token 0 above which a head counts in the sink rate
BY_STREAM = tuple(ByStream.model_fields)  # measured on the mean of the residual streams, and on each
ByLayer = dict[int, Tensor]


class CrossLayerCosines:
    """How well the approximations of arXiv 2410.17897 match attention over two layers, on any model (its Fig. 4).

        Eq. 2  U = softmax(Q_n [K_n; K_m]ᵀ/√d) [V_n; V_m]      true cross-layer attention
        Eq. 4  U = ½ A_n (V_n + V_m)                            current attention: the value residual
        Eq. 6  U = A_n V_n + V_m                                identity attention

    with m the previous or the first layer. The measure is the cosine with Eq. 2, over all heads together, averaged over
    tokens. Calls come in layer order; `by_form` maps form and source → layer → cosine.
    """

    def __init__(self):
        self.by_form: dict[str, dict[int, Tensor]] = {f"{form}_{source}": {} for form in FORMS for source in SOURCES}
        self.states: dict[str, tuple[Tensor, Tensor]] = {}

    def measure(self, call: AttentionCall) -> None:
        """Compare a layer with the previous and the first layer; pairs of different shapes are skipped."""
        if call.softcap is not None or call.sinks is not None or call.position_bias is not None:
            raise ValueError(
                f"layer {call.layer}: `cross_layer` needs plain softmax attention, without soft-caps, learned sinks or "
                "position biases"
            )
        groups = call.query.shape[1] // call.key.shape[1]
        key = call.key.repeat_interleave(groups, dim=1)  # (B, H_kv, T, D) → (B, H, T, D)
        value = call.value.repeat_interleave(groups, dim=1)
        for source in SOURCES:
            other = self.states.get(source)
            if other is not None and other[0].shape == key.shape and other[1].shape == value.shape:
                for form, cosine in zip(FORMS, _cosines(call, key, value, *other), strict=True):
                    self.by_form[f"{form}_{source}"][call.layer] = cosine
        self.states["previous"] = (key, value)
        self.states.setdefault("first", (key, value))


def _cosines(call: AttentionCall, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor) -> list[Tensor]:
    """Return the cosines of Eq. 4 and Eq. 6 with Eq. 2; states are (B, H, T, D)."""
    mask = _mask(call)
    two_masks = None if mask is None else torch.cat([mask, mask], dim=-1)  # (…, T, 2T)
    keys, values = torch.cat([key, other_key], dim=2), torch.cat([value, other_value], dim=2)  # (B, H, 2T, D)
    attend = partial(functional.scaled_dot_product_attention, call.query, scale=call.scaling)
    true = attend(keys, values, attn_mask=two_masks)
    own, other = attend(key, value, attn_mask=mask), attend(key, other_value, attn_mask=mask)
    kind, flat = torch.promote_types(own.dtype, torch.float32), []
    for heads in (true, (own + other) / 2, own + other_value):
        flat.append(heads.transpose(1, 2).flatten(2).to(kind))  # (B, H, T, D) → (B, T, H·D)
    return [functional.cosine_similarity(flat[0], form, dim=-1).mean() for form in flat[1:]]


def _mask(call: AttentionCall) -> Tensor | None:
    """Return the mask of a layer, (…, T, T); None if it masks nothing."""
    if call.mask is not None:
        return call.mask[..., : call.key.shape[2]]
    if not is_causal(call):
        return None
    rows, columns = call.query.shape[2], call.key.shape[2]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=call.query.device).tril()
    return mask if call.window is None else mask.triu(1 - call.window)  # row i sees columns i − window + 1 … i


@dataclass(frozen=True)
class SequenceMeasures:
    """The measures of a sequence, in float64."""

    measures: dict[str, np.ndarray]  # by name, (L,), (L, L) or (L, k)
    cross_layer: dict[str, np.ndarray]  # by name, (L,); empty unless requested
    by_stream: dict[str, np.ndarray]  # by name, (L, N) for N residual streams; empty if N is 1
    shares: np.ndarray  # each token's share of a layer's attention, a' (L, T)
    value_norms: np.ndarray  # L2 norm of each token's values over the head size, mean over key-value heads, (L, T)
    hidden_norms: np.ndarray  # L2 norm of each token's hidden state, mean of the streams, at a layer's input, (L, T)
    last: np.ndarray  # the last token's attention to each, (L, T)
    channels: np.ndarray  # of the MLP's output at token 0: values, and magnitudes over their median, (L, 2, C)
    shapes: list[LayerShape | None]  # of each layer's attention; None if it has none
    over_depth: bool  # whether layers read by attention over depth
    depth: DepthMixing  # what sublayers take from earlier ones
    gates: np.ndarray | None  # mean output gate of each head, (L, H); None if no layer has one
    gated_shares: np.ndarray | None  # each token's share of a layer's attention after the gate, (L, T)


def measure_sequence(model: PreTrainedModel, ids: Tensor, cross_layer: bool = False) -> SequenceMeasures:
    """Run the model over token ids (T,) and measure every layer."""
    recorder = _Recorder(CrossLayerCosines() if cross_layer else None)
    ids = ids[None].to(next(model.parameters()).device)  # (1, T)
    with (
        visited(model, recorder.attention),
        streams(model, recorder.stream),
        depth_mixing(model) as depth,
        output_gates(model) as gates,
    ):
        model.base_model(input_ids=ids, **no_cache(model))  # the logits are not needed
    layers, calls = len(layer_stack(model)), sorted(recorder.calls, key=lambda call: call.layer)
    norms = [recorder.value_norms[call.layer] for call in calls]
    of_pairs, of_maps, shares, last, gated = _measure_maps(calls, norms, gates)
    measures = {name: spread(by_layer, layers) for name, by_layer in {**recorder.by_layer, **of_maps}.items()}
    attending = [call.layer for call in calls]
    for name, matrix in of_pairs.items():
        measures[name] = np.full((layers, layers), np.nan)
        measures[name][np.ix_(attending, attending)] = matrix.cpu().numpy()
    cosines = {} if recorder.cosines is None else dict(recorder.cosines.by_form)
    if cosines and not recorder.over_depth:
        cosines |= _responses(model, ids)
    shapes = LayerShape.read(recorder.calls, model.config.get_text_config(), layers)
    return SequenceMeasures(
        measures=measures,
        by_stream={name: spread(by_layer, layers) for name, by_layer in recorder.by_stream.items() if by_layer},
        cross_layer={name: spread(by_layer, layers) for name, by_layer in cosines.items()},
        shares=spread(shares, layers),
        value_norms=spread({layer: norms.mean(dim=0) for layer, norms in recorder.value_norms.items()}, layers),
        hidden_norms=spread(recorder.hidden_norms, layers),
        last=spread(last, layers),
        channels=spread(recorder.channels, layers),
        shapes=shapes,
        over_depth=recorder.over_depth,
        depth=depth,
        gates=spread({layer: gate.mean(dim=0) for layer, gate in gates.items()}, layers) if gates else None,
        gated_shares=spread(gated, layers) if gates else None,
    )


def _responses(model: PreTrainedModel, ids: Tensor) -> dict[str, ByLayer]:
    """Return what the layer below changes in a layer's map of that layer's keys (arXiv 2502.00439, appendix C).

    Scores A = Q(x_i) K_iᵀ/√d and their change by Q(x_{i+1}): layer i + 1 runs twice, also on what layer i received.
    """
    calls: dict[int, list[AttentionCall]] = {}
    entered: list[Tensor] = []

    def run_twice(layer: nn.Module, args: Any, kwargs: Any) -> None:
        if entered:
            layer.forward(entered[-1], *args[1:], **kwargs)
        entered.append(args[0])

    with ExitStack() as hooks, visited(model, lambda call: calls.setdefault(call.layer, []).append(over_tokens(call))):
        for layer in layer_stack(model):
            hooks.callback(layer.register_forward_pre_hook(run_twice, with_kwargs=True).remove)
        model.base_model(input_ids=ids, **no_cache(model))
    found: dict[str, ByLayer] = {"softmax_jacobian": {}, "map_response": {}}
    for layer in sorted(layer for layer in calls if layer - 1 in calls):
        (below, own), key = calls[layer], m.working(calls[layer - 1][-1].key[0]).mT  # (H_kv, D, T)
        if key.mT.shape != own.key.shape[1:]:
            continue
        mask, group, by_head = _mask(own), own.query.shape[1] // len(key), []
        for head in range(own.query.shape[1]):
            scores, new = (m.working(call.query[0, head]) @ key[head // group] * own.scaling for call in (below, own))
            if mask is not None:
                seen = mask if mask.dim() == 2 else mask[0, head % mask.shape[1]]  # (T, T)
                blocked = ~seen if seen.dtype == torch.bool else seen < torch.finfo(seen.dtype).min / 2
                scores, new = scores.masked_fill(blocked, BLOCKED), new.masked_fill(blocked, BLOCKED)
            by_head.append(torch.stack(m.softmax_response(scores, new - scores)))
        for by_layer, norm in zip(found.values(), torch.stack(by_head).mean(dim=0), strict=True):
            by_layer[layer] = norm
    return found


def spread(by_layer: ByLayer, layers: int) -> np.ndarray:
    """Return the values (…) of layers as an array (L, …); NaN for layers without a value, and behind shorter rows."""
    shapes = [tuple(value.shape) for value in by_layer.values()]
    full = np.full((layers, *(max(sizes) for sizes in zip(*shapes, strict=True))), np.nan)
    for layer, value in by_layer.items():
        full[(layer, *map(slice, value.shape))] = value.double().cpu().numpy()
    return full


class _Recorder:
    """Measures layers while a forward pass runs; keeps queries and keys, but no tensor that is measured at once."""

    def __init__(self, cosines: CrossLayerCosines | None):
        self.cosines = cosines
        self.calls: list[AttentionCall] = []
        self.by_layer: dict[str, ByLayer] = {name: {} for name in Measures.model_fields}
        self.by_stream: dict[str, ByLayer] = {name: {} for name in BY_STREAM}
        self.value_norms: ByLayer = {}
        self.hidden_norms: ByLayer = {}
        self.channels: ByLayer = {}
        self.over_depth = False

    def attention(self, call: AttentionCall) -> None:
        """Measure the values, and keep queries and keys."""
        if any(earlier.layer == call.layer for earlier in self.calls):
            raise ValueError(
                f"layer {call.layer} attends twice, probably by cross-attention; only self-attention can be measured"
            )
        call = over_tokens(call)
        value = call.value[0]  # (H_kv, T, D)
        self.by_layer["value_norm_ratio"][call.layer] = m.over_median(m.value_norms(value))
        self.by_layer["value_spectrum"][call.layer] = m.value_spectrum(value)
        self.by_layer["key_norm_ratio"][call.layer] = m.over_median(m.value_norms(call.key[0]))
        first, others = m.cosines_with_queries(call.query[0], call.key[0])
        self.by_layer["query_key_cosine"][call.layer] = first
        self.by_layer["query_key_cosine_others"][call.layer] = others
        self.value_norms[call.layer] = m.working(value).norm(dim=-1)  # (H_kv, T)
        if self.cosines is not None:
            self.cosines.measure(call)
        self.calls.append(replace(call, value=call.value[:, :, :0].clone()))

    def stream(self, stream: LayerStream) -> None:
        """Measure the residual stream around a layer."""
        last = stream.entering if stream.leaving is None else stream.leaving
        if not last.isfinite().all():
            narrow = last.dtype == torch.float16  # its largest number is 65,504
            then = "try bfloat16 or float32" if narrow else "check the weights, which may hold NaN"
            dtype = str(last.dtype).removeprefix("torch.")
            raise ValueError(f"layer {stream.layer} produces hidden states that are not finite in {dtype}; {then}")
        self.over_depth = self.over_depth or stream.over_depth
        self.hidden_norms[stream.layer] = m.hidden_norms(mean_stream(stream.entering))  # (T,)
        for name, measure in _measure_stream(stream).items():
            self.by_layer[name][stream.layer] = measure
        if len(stream.entering) > 1:
            each = [_measure_stream(stream, number) for number in range(len(stream.entering))]
            for name in each[0]:
                self.by_stream[name][stream.layer] = torch.stack([measures[name] for measures in each])  # (N,)
        if stream.mlp_update is not None:
            flatness = m.l1_over_l2(stream.mlp_update)  # (T,)
            self.by_layer["mlp_l1_l2"][stream.layer] = flatness[0]
            self.by_layer["mlp_l1_l2_others"][stream.layer] = flatness[1:].quantile(0.5)
            first = m.working(stream.mlp_update[0])  # (C,)
            self.channels[stream.layer] = torch.stack([first, m.channel_ratios(first)])


def _measure_stream(stream: LayerStream, number: int | None = None) -> dict[str, Tensor]:
    """Return the measures of residual stream `number`, by default of the mean of all, by name."""

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
        if number is None:
            measures["depth_factor"] = m.depth_factor(before, pick(stream.leaving))
    if around is not None and (number is None or len(around[0]) > 1):
        measures["attention_io_similarity"] = m.mean_cosine(pick(around[0]), pick(around[1]))
    return measures


def _measure_maps(
    calls: list[AttentionCall], norms: list[Tensor], gates: dict[int, Tensor]
) -> tuple[dict[str, Tensor], dict[str, ByLayer], ByLayer, ByLayer, ByLayer]:
    """Return measures of pairs of attention layers, (L, L), and of single layers; the shares a'; the last rows.

    Last come the shares after the output gate, of those layers that have one.
    """
    layers, sums = [call.layer for call in calls], map_sums(calls, norms, gates)
    shares = m.importance(sums.columns)  # (L, T)
    by_head = sums.columns_by_head[:, :, 0] / calls[0].key.shape[2]  # (L, H), a mean over rows: all see token 0
    sinking = (by_head > SINK_THRESHOLD).double().masked_fill(by_head.isnan(), torch.nan)
    of_layers = {
        "first_token_share": shares[:, 0],
        "first_token_by_head": by_head,
        "first_contribution": sums.contribution[:, 0] / sums.contribution[:, 1],
        "entropy": m.entropy(shares),
        "sink_rate": sinking.nanmean(dim=-1),
        "top_importance": m.top_importance(shares),
    }
    of_pairs = {
        "map_similarity": m.gram_cosine(sums.gram),
        "map_similarity_per_head": m.gram_cosine(sums.gram_by_head).nanmean(dim=0),
        "map_similarity_without_first": m.gram_cosine(sums.gram_without_first),
    }
    by_layer = {name: dict(zip(layers, rows, strict=True)) for name, rows in of_layers.items()}
    gated = {layer: row for layer, row in zip(layers, sums.gated, strict=True) if layer in gates}
    return (
        of_pairs,
        by_layer,
        dict(zip(layers, shares, strict=True)),
        dict(zip(layers, sums.last, strict=True)),
        gated,
    )

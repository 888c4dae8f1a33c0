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
# Mean attention to token 0 above which a head counts in the sink rate: that of Gu et al. 2024.
SINK_THRESHOLD = 0.3
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
        mask = _mask(call)
        two_masks = None if mask is None else torch.cat([mask, mask], dim=-1)  # (…, T, 2T)
        attend = partial(functional.scaled_dot_product_attention, call.query, scale=call.scaling)
        for source in SOURCES:
            other_key, other_value = self.states.get(source, (None, None))
            if other_key is None or other_value is None:
                continue
            if other_key.shape != key.shape or other_value.shape != value.shape:
                continue
            keys, values = torch.cat([key, other_key], dim=2), torch.cat([value, other_value], dim=2)  # (B, H, 2T, D)
            both = attend(keys, values, attn_mask=two_masks)
            current = attend(key, value, attn_mask=mask)
            other = attend(key, other_value, attn_mask=mask)
            approximations = {"current": (current + other) / 2, "identity": current + other_value}

            # (B, H, T, D) → (B, T, H·D), in float32 at least: a cosine near 1 has no digits left in bfloat16
            precision = torch.promote_types(current.dtype, torch.float32)
            expected = both.transpose(1, 2).flatten(2).to(precision)
            for form, heads in approximations.items():
                flat = heads.transpose(1, 2).flatten(2).to(precision)
                cosine = functional.cosine_similarity(expected, flat, dim=-1).mean()
                self.by_form[f"{form}_{source}"][call.layer] = cosine
        self.states["previous"] = (key, value)
        self.states.setdefault("first", (key, value))


def _mask(call: AttentionCall) -> Tensor | None:
    """Return the mask of a layer, (…, T, T); None if it masks nothing."""
    if call.mask is not None:
        return call.mask[..., : call.key.shape[2]]
    if not is_causal(call):
        return None
    mask = torch.ones(call.query.shape[2], call.key.shape[2], dtype=torch.bool, device=call.query.device).tril()
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
    activations: np.ndarray  # the same of the hidden states, at token 0 and the largest of the others, (L, 2, 2, C)
    shapes: list[LayerShape | None]  # of each layer's attention; None if it has none
    over_depth: bool  # whether layers read by attention over depth
    depth: DepthMixing  # what sublayers take from earlier ones
    gates: np.ndarray | None  # mean output gate of each head, (L, H); None if no layer has one
    gated_shares: np.ndarray | None  # each token's share of a layer's attention after the gate, (L, T)


def measure_sequence(model: PreTrainedModel, ids: Tensor, cross_layer: bool = False) -> SequenceMeasures:
    """Run the model over token ids (T,) and measure every layer."""
    recorder = _Recorder(CrossLayerCosines() if cross_layer else None)
    ids = ids[None].to(next(model.parameters()).device)  # (1, T)
    # the body alone: without logits a pass takes 20% less time (SmolLM2)
    with (
        visited(model, recorder.attention),
        streams(model, recorder.stream),
        depth_mixing(model) as depth,
        output_gates(model) as gates,
    ):
        model.base_model(input_ids=ids, **no_cache(model))
    recorder.maps(gates)
    layers, attending = len(layer_stack(model)), sorted(recorder.value_norms)
    measures = {name: spread(by_layer, layers) for name, by_layer in recorder.by_layer.items()}
    for name, matrix in recorder.of_pairs.items():
        measures[name] = np.full((layers, layers), np.nan)
        measures[name][np.ix_(attending, attending)] = matrix.cpu().numpy()
    cosines = {} if recorder.cosines is None else dict(recorder.cosines.by_form)
    # with attention over depth a layer does not read what it receives, and cannot run on what another one received
    if cosines and not recorder.over_depth:
        cosines |= _responses(model, ids)
    shapes = LayerShape.read(recorder.calls, model.config.get_text_config(), layers)
    return SequenceMeasures(
        measures=measures,
        by_stream={name: spread(by_layer, layers) for name, by_layer in recorder.by_stream.items() if by_layer},
        cross_layer={name: spread(by_layer, layers) for name, by_layer in cosines.items()},
        shares=spread(recorder.shares, layers),
        value_norms=spread({layer: norms.mean(dim=0) for layer, norms in recorder.value_norms.items()}, layers),
        hidden_norms=spread(recorder.hidden_norms, layers),
        last=spread(recorder.last, layers),
        channels=spread(recorder.channels, layers),
        activations=spread(recorder.activations, layers),
        shapes=shapes,
        over_depth=recorder.over_depth,
        depth=depth,
        gates=spread({layer: gate.mean(dim=0) for layer, gate in gates.items()}, layers) if gates else None,
        gated_shares=spread(recorder.gated, layers) if gates else None,
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
    norms: dict[str, ByLayer] = {"softmax_jacobian": {}, "map_response": {}}
    for layer in sorted(layer for layer in calls if layer - 1 in calls):
        # the first of a layer's two calls is on what the layer below received
        (below, usual), key = calls[layer], m.working(calls[layer - 1][-1].key[0]).mT  # (H_kv, D, T)
        if key.mT.shape != usual.key.shape[1:]:
            continue
        mask, group, by_head = _mask(usual), usual.query.shape[1] // len(key), []
        for head in range(usual.query.shape[1]):
            of_head = key[head // group]
            scores = m.working(below.query[0, head]) @ of_head * usual.scaling
            new = m.working(usual.query[0, head]) @ of_head * usual.scaling
            if mask is not None:
                seen = mask if mask.dim() == 2 else mask[0, head % mask.shape[1]]  # (T, T)
                blocked = ~seen if seen.dtype == torch.bool else seen < torch.finfo(seen.dtype).min / 2
                scores, new = scores.masked_fill(blocked, BLOCKED), new.masked_fill(blocked, BLOCKED)
            by_head.append(torch.stack(m.softmax_response(scores, new - scores)))
        for by_layer, norm in zip(norms.values(), torch.stack(by_head).mean(dim=0), strict=True):
            by_layer[layer] = norm
    return norms


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
        self.activations: ByLayer = {}
        self.over_depth = False
        self.of_pairs: dict[str, Tensor] = {}  # by name, of those layers that have attention, (L, L)
        self.shares: ByLayer = {}  # a', (T,)
        self.last: ByLayer = {}  # the last row of the map, (T,)
        self.gated: ByLayer = {}  # a' after the output gate, of layers that have one

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
        # a clone, since a view of no values would keep them all
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
        before, after, around = stream.before, stream.after, stream.around_attention
        self.hidden_norms[stream.layer] = m.hidden_norms(before)  # (T,)
        self.activations[stream.layer] = m.activation_ratios(before)  # (2, 2, C)
        means = None if around is None else (mean_stream(around[0]), mean_stream(around[1]))
        for name, measure in _measure_stream(before, after, means).items():
            self.by_layer[name][stream.layer] = measure
        if after is not None:
            self.by_layer["depth_factor"][stream.layer] = m.depth_factor(before, after)
        if len(stream.entering) > 1:
            each = []
            for index, entering in enumerate(stream.entering):
                # where attention writes no stream, what it reads is a single one
                pair = (around[0][index], around[1][index]) if around is not None and len(around[0]) > 1 else None
                each.append(_measure_stream(entering, None if stream.leaving is None else stream.leaving[index], pair))
            for name in each[0]:
                self.by_stream[name][stream.layer] = torch.stack([measures[name] for measures in each])  # (N,)
        if stream.mlp_update is not None:
            flatness = m.l1_over_l2(stream.mlp_update)  # (T,)
            self.by_layer["mlp_l1_l2"][stream.layer] = flatness[0]
            self.by_layer["mlp_l1_l2_others"][stream.layer] = flatness[1:].quantile(0.5)
            first = m.working(stream.mlp_update[0])  # (C,)
            self.channels[stream.layer] = torch.stack([first, m.channel_ratios(first)])

    def maps(self, gates: dict[int, Tensor]) -> None:
        """Measure the maps of all layers that have attention, from their queries and keys; `gates` (T, H) by layer."""
        calls = sorted(self.calls, key=lambda call: call.layer)
        layers = [call.layer for call in calls]
        sums = map_sums(calls, [self.value_norms[layer] for layer in layers], gates)
        shares = m.importance(sums.columns)  # (L, T)
        # (L, H), a mean over all rows, also those whose window ends before token 0
        by_head = sums.columns_by_head[:, :, 0] / calls[0].key.shape[2]
        sinking = (by_head > SINK_THRESHOLD).double().masked_fill(by_head.isnan(), torch.nan)
        of_layers = {
            "first_token_share": shares[:, 0],
            "first_token_by_head": by_head,
            "first_contribution": sums.contribution[:, 0] / sums.contribution[:, 1],
            "entropy": m.entropy(shares),
            "sink_rate": sinking.nanmean(dim=-1),
            "top_importance": m.top_importance(shares),
        }
        for name, values in of_layers.items():
            self.by_layer[name] = dict(zip(layers, values, strict=True))
        self.of_pairs = {
            "map_similarity": m.gram_cosine(sums.gram),
            "map_similarity_per_head": m.gram_cosine(sums.gram_by_head).nanmean(dim=0),
            "map_similarity_without_first": m.gram_cosine(sums.gram_without_first),
        }
        self.shares = dict(zip(layers, shares, strict=True))
        self.last = dict(zip(layers, sums.last, strict=True))
        self.gated = {layer: gated for layer, gated in zip(layers, sums.gated, strict=True) if layer in gates}


def _measure_stream(
    before: Tensor, after: Tensor | None, around_attention: tuple[Tensor, Tensor] | None
) -> dict[str, Tensor]:
    """Return the measures by name of one residual stream, or of their mean, (T, C) at each place."""
    norms = m.hidden_norms(before)  # (T,)
    measures = {
        "hidden_norm_ratio": m.over_median(norms),
        "stream_norm": norms.mean(),
        "token_similarity": m.token_similarity(before),
    }
    if after is not None:
        measures["layer_io_similarity"] = m.mean_cosine(before, after)
    if around_attention is not None:
        measures["attention_io_similarity"] = m.mean_cosine(*around_attention)
    return measures

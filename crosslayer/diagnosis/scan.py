"""Diagnose a model: every measure of every layer in one forward pass a sequence, with intervals over sequences.

Flows: tokens → visited attention calls and residual streams → measures of one sequence → mean and interval → verdict.
The forward pass keeps queries and keys; the maps are computed from them afterwards, block by block (`probe/maps.py`).
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import pack
from crosslayer.diagnosis.cross_layer import CrossLayerCosines
from crosslayer.diagnosis.tokens import position_table, top_tokens
from crosslayer.diagnosis.verdict import verdict
from crosslayer.environment import environment
from crosslayer.output.summary import by_position, summarise
from crosslayer.probe import measures as m
from crosslayer.probe.intercept import AttentionCall, attention_layers, evaluating, layer_stack, no_cache, visited
from crosslayer.probe.maps import map_sums
from crosslayer.probe.shapes import LayerShape
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.probe.tokens import check_ids

SINK_THRESHOLD = 0.3  # of a head's mean attention to token 0, for the sink rate

Progress = Callable[[int, int], None]  # sequences done, sequences in all


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    `samples` maps the name of each measure to an array (N, L), (N, L, L) or (N, L, k) over the N sequences, NaN where a
    layer has no such sublayer.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    samples: dict[str, np.ndarray]
    positions: dict[str, Any]
    tokens: list[list[dict[str, Any]]]
    position_table: dict[str, Any] | None
    shapes: list[LayerShape | None]
    seconds: float
    made_with: dict[str, Any] = field(default_factory=environment)

    def record(self) -> dict[str, Any]:
        """Return everything as plain data; this is what `record.json` holds."""
        found = {name: summarise(sample) for name, sample in self.samples.items()}
        return {
            "schema": "crosslayer/diagnosis/1",
            "model": self.model,
            "settings": self.settings,
            "measures": found,
            "importance_by_position": self.positions,
            "top_tokens": self.tokens,
            "position_table": self.position_table,
            "verdict": verdict(found, self.shapes, self.settings["length"]),
            "seconds": self.seconds,
            "environment": self.made_with,
        }


@torch.no_grad()
def diagnose(
    model: PreTrainedModel,
    ids_or_texts: Tensor | Iterable[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    settings: dict[str, Any] | None = None,
    progress: Progress | None = None,
    cross_layer: bool = False,
    **packing: Any,
) -> Diagnosis:
    """Measure sinks, value drains, peaks, concentration and redundancy of every layer; the model is left unchanged.

    Args:
        model: any causal or bidirectional Hugging Face model whose attention goes through the attention interface.
        ids_or_texts: token ids (B, T) with T ≥ 2 and no padding, or texts, packed by `crosslayer.text.pack`.
        tokenizer: needed for texts, and to show tokens as text.
        settings: what the record should say about the run, beside what is known here.
        progress: called after each sequence.
        cross_layer: also compare the value residual with true cross-layer attention (Fig. 4 of ResFormer), at the cost
            of about six more attention calls a layer.
        packing: sequences, length, seed and bos, for texts.

    Raises:
        ValueError: the model cannot be probed, the sequences are longer than its positions, or the ids do not fit.

    """
    ids = _as_ids(ids_or_texts, tokenizer, packing)
    check_ids(model, ids)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("prompt-learning adapters add tokens outside the layers; diagnose the base model instead")
    started, found = time.perf_counter(), []
    with evaluating(model):
        for number, sequence in enumerate(ids):
            found.append(_Sequence(model, CrossLayerCosines() if cross_layer else None).measure(sequence))
            if progress is not None:
                progress(number + 1, len(ids))
    samples = {name: np.stack([one.values[name] for one in found]) for name in found[0].values}
    shares = np.stack([one.shares for one in found])
    return Diagnosis(
        model=describe(model, found[0]),
        settings={"sequences": len(ids), "length": ids.shape[1], **packing, **(settings or {})},
        samples=samples,
        positions=by_position(shares).model_dump(),
        tokens=top_tokens(shares, ids.cpu().numpy(), tokenizer),
        position_table=position_table(model),
        shapes=found[0].shapes,
        seconds=time.perf_counter() - started,
    )


class _Sequence:
    """Measures of one sequence; `values` holds float64 arrays, L the number of layers in the stack."""

    def __init__(self, model: PreTrainedModel, cross_layer: CrossLayerCosines | None):
        self.model, self.layers, self.cross_layer = model, len(layer_stack(model)), cross_layer
        self.calls: list[AttentionCall] = []
        self.values: dict[str, np.ndarray] = {}
        self.scalars: dict[str, dict[int, Tensor]] = {}
        self.shapes: list[LayerShape | None] = [None] * self.layers
        self.shares = np.empty(0)

    def measure(self, sequence: Tensor) -> "_Sequence":
        body = self.model.base_model  # the logits are not needed
        device = next(self.model.parameters()).device
        with visited(self.model, self._see_attention), streams(self.model, self._see_stream):
            body(input_ids=sequence[None].to(device), **no_cache(self.model))
        self.shapes = LayerShape.read(self.calls, self.model.config.get_text_config(), self.layers)
        self._maps()
        if self.cross_layer is not None:
            self.scalars |= self.cross_layer.found
        for name, by_layer in self.scalars.items():
            self.values[name] = self._spread(by_layer)
        self.calls.clear()
        return self

    def _see_attention(self, call: AttentionCall) -> None:
        if any(seen.layer == call.layer for seen in self.calls):
            raise ValueError(
                f"layer {call.layer} attends twice (cross-attention?); only self-attention can be diagnosed"
            )
        value = call.value[0]
        self._keep("value_norm_ratio", call.layer, m.over_median(m.value_norms(value)))
        self._keep("value_spectrum", call.layer, m.value_spectrum(value))
        if self.cross_layer is not None:
            self.cross_layer.see(call)
        self.calls.append(_without_value(call))

    def _see_stream(self, stream: LayerStream) -> None:
        norms = m.hidden_norms(stream.before)
        if not stream.after.isfinite().all():
            kind = str(stream.after.dtype).removeprefix("torch.")
            raise ValueError(f"layer {stream.layer} produces hidden states that are not finite in {kind}; try float32")
        self._keep("hidden_norm_ratio", stream.layer, m.over_median(norms))
        self._keep("stream_norm", stream.layer, norms.mean())
        self._keep("token_similarity", stream.layer, m.token_similarity(stream.before))
        self._keep("layer_io_similarity", stream.layer, m.mean_cosine(stream.before, stream.after))
        if stream.after_attention is not None:
            similarity = m.mean_cosine(stream.before, stream.after_attention)
            self._keep("attention_io_similarity", stream.layer, similarity)
        if stream.mlp_update is not None:
            flatness = m.l1_over_l2(stream.mlp_update)
            self._keep("mlp_l1_l2", stream.layer, flatness[0])
            self._keep("mlp_l1_l2_others", stream.layer, flatness[1:].quantile(0.5))

    def _keep(self, name: str, layer: int, value: Tensor) -> None:
        self.scalars.setdefault(name, {})[layer] = value

    def _maps(self) -> None:
        self.calls.sort(key=lambda call: call.layer)
        layers, size = [call.layer for call in self.calls], self.calls[0].key.shape[2]
        sums = map_sums(self.calls)
        shares = m.importance(sums.columns)
        sinking = (sums.first_by_head / size > SINK_THRESHOLD).double()  # rows that see token 0: all
        sinking[sums.first_by_head.isnan()] = torch.nan
        by_layer = {
            "first_token_share": shares[:, 0],
            "entropy": m.entropy(shares),
            "sink_rate": sinking.nanmean(dim=-1),
            "top_importance": m.top_importance(shares),
        }
        for name, values in by_layer.items():
            self.values[name] = self._spread(dict(zip(layers, values, strict=True)))
        heads = m.gram_cosine(sums.gram_by_head)
        pairs = {
            "map_similarity": m.gram_cosine(sums.gram),
            "map_similarity_per_head": heads.nanmean(dim=0),
            "map_similarity_without_first": m.gram_cosine(sums.gram_without_first),
        }
        for name, matrix in pairs.items():
            full = np.full((self.layers, self.layers), np.nan)
            full[np.ix_(layers, layers)] = matrix.cpu().numpy()
            self.values[name] = full
        self.shares = self._spread(dict(zip(layers, shares, strict=True)))

    def _spread(self, by_layer: dict[int, Tensor]) -> np.ndarray:
        """Return one array over all layers, NaN where a layer has no value."""
        width = max(value.numel() for value in by_layer.values())
        full = np.full((self.layers, width), np.nan)
        for layer, value in by_layer.items():
            full[layer, : value.numel()] = value.double().cpu().numpy()
        return full if next(iter(by_layer.values())).dim() else full[:, 0]


def describe(model: PreTrainedModel, one: "_Sequence") -> dict[str, Any]:
    """Return what the record says of the model itself."""
    config = model.config.get_text_config()
    shapes = [shape for shape in one.shapes if shape is not None]
    return {
        "class": type(model).__name__,
        "type": model.config.model_type,
        "layers": len(one.shapes),
        "attention_layers": len(attention_layers(model.config)),
        "hidden_size": config.hidden_size,
        "heads": shapes[0].heads,
        "kv_heads": shapes[0].kv_heads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": config._attn_implementation,
        "masks": [None if shape is None else shape.mask for shape in one.shapes],
    }


def _as_ids(given: Tensor | Iterable[str], tokenizer: PreTrainedTokenizerBase | None, packing: dict) -> Tensor:
    if isinstance(given, Tensor):
        if packing:
            raise ValueError(f"{', '.join(packing)}: only texts are packed; token ids are taken as they are")
        return given
    if tokenizer is None:
        raise ValueError("texts need tokenizer=…; without one give token ids (B, T)")
    return pack([given] if isinstance(given, str) else given, tokenizer, **packing)


def _without_value(call: AttentionCall) -> AttentionCall:
    """Drop the values, which are measured already, so that only queries and keys stay in memory."""
    return AttentionCall(
        call.module, call.layer, call.query, call.key, call.value[:, :, :0].clone(), call.mask, call.options
    )

"""What is read off a forward pass, at the positions that an intervention is about.

    attention received by k, in a layer:  mean over heads and over the rows i ≠ k that may see k of A_ik

For a causal model these rows are the tokens behind k. They are those of the model's own mask, whatever is done to it.

Source: "Unveiling and Controlling Anomalous Attention Distribution in Transformers" (arXiv 2407.01601), 3 and 4.
Shapes: N sequences, T tokens, L layers, P positions.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from crosslayer.output.progress import Steps
from crosslayer.probe import measures as m
from crosslayer.probe.entries import has_entries
from crosslayer.probe.intercept import AttentionCall, layer_stack, no_cache, visited
from crosslayer.probe.maps import is_causal, map_sums, rows_that_see
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.verbs.intervene.apply import intervening
from crosslayer.verbs.intervene.kinds import Kind


@dataclass(frozen=True)
class Sample:
    """The readings of N sequences in float64; NaN where a layer has no such sublayer.

    `attention_received`, `hidden_norm_ratio`, `value_norm_ratio` and `mlp_l1_l2` are (N, L, P); the last is None where
    no layer has an MLP of its own. `received` (N, L, T) is the attention received by every token. `loss_behind` (N, P)
    is the mean cross-entropy in nats of what the tokens behind a position predict, None where it was not asked for or
    the model predicts no next tokens, NaN for positions before the first that was asked for.
    """

    causal: bool
    attention_received: np.ndarray
    hidden_norm_ratio: np.ndarray
    value_norm_ratio: np.ndarray
    mlp_l1_l2: np.ndarray | None
    received: np.ndarray
    loss_behind: np.ndarray | None


class Passes:
    """Runs sequences through a model, each by itself, and shows how many forward passes of `total` are done."""

    def __init__(self, model: PreTrainedModel, total: int, steps: Steps):
        self.model, self.total, self.steps, self.done = model, total, steps, 0

    @torch.no_grad()
    def sample(
        self, ids: Tensor, positions: Sequence[int], interventions: Sequence[Kind] = (), loss_from: int | None = None
    ) -> Sample:
        """Return the readings of token ids (N, T) at P positions under interventions; the model is left unchanged.

        The loss is computed from the tokens after `loss_from` on, not at all by default.
        """
        observers, losses = [], []
        for sequence in ids:
            observer = _Observer(self.model, positions)
            losses.append(observer.run(sequence, interventions, loss_from))
            observers.append(observer)
            self.done += 1
            self.steps.step(self.done, self.total)
        first = observers[0]
        return Sample(
            causal=first.causal,
            attention_received=np.stack([observer.spread(observer.attention) for observer in observers]),
            hidden_norm_ratio=np.stack([observer.spread(observer.hidden_norms) for observer in observers]),
            value_norm_ratio=np.stack([observer.spread(observer.value_norms) for observer in observers]),
            mlp_l1_l2=np.stack([observer.spread(observer.mlp) for observer in observers]) if first.mlp else None,
            received=np.stack([observer.spread(observer.received) for observer in observers]),
            loss_behind=np.stack(losses) if first.causal and losses[0] is not None else None,
        )


class _Observer:
    """Sees a forward pass of a single sequence; keeps readings by layer, (P,), and attention received, (T,)."""

    def __init__(self, model: PreTrainedModel, positions: Sequence[int]):
        self.model, self.positions = model, list(positions)
        self.causal = True
        self.rows: dict[int, Tensor] = {}  # how many other rows may see each token
        self.received: dict[int, Tensor] = {}
        self.attention: dict[int, Tensor] = {}
        self.hidden_norms: dict[int, Tensor] = {}
        self.value_norms: dict[int, Tensor] = {}
        self.mlp: dict[int, Tensor] = {}

    def run(self, sequence: Tensor, interventions: Sequence[Kind], loss_from: int | None) -> np.ndarray | None:
        """Run the sequence, (T,); return the loss behind each position, (P,), where it is asked for."""
        ids = sequence[None].to(self.model.device)  # (1, T)
        with ExitStack() as stack:
            stack.enter_context(visited(self.model, self._see_rows))  # outermost: the masks as they are
            stack.enter_context(intervening(self.model, *interventions))
            stack.enter_context(visited(self.model, self._see_attention))
            stack.enter_context(streams(self.model, self._see_stream))
            if loss_from is not None and self.model.can_generate():
                return self._loss(ids, loss_from)
            self.model.base_model(input_ids=ids, **no_cache(self.model))
        return None

    def spread(self, by_layer: dict[int, Tensor]) -> np.ndarray:
        """Return readings over all layers, (L, P) or (L, T), NaN where a layer has none."""
        width = len(next(iter(by_layer.values())))
        full = np.full((len(layer_stack(self.model)), width), np.nan)
        for layer, reading in by_layer.items():
            full[layer] = reading.double().cpu().numpy()
        return full

    def _loss(self, ids: Tensor, loss_from: int) -> np.ndarray:
        """Return the mean cross-entropy of what the tokens behind each position predict, in nats, (P,).

        Logits are computed behind `loss_from` only, where the model can; positions before it get NaN.
        """
        rows = ids.shape[1] - 1 - loss_from
        keep = {"logits_to_keep": rows} if "logits_to_keep" in signature(self.model.forward).parameters else {}
        output = self.model(input_ids=ids, **no_cache(self.model), **keep)
        logits = output.logits[0, -rows:-1].float()  # (rows - 1, vocabulary)
        nll = cross_entropy(logits, ids[0, loss_from + 2 :], reduction="none").double()  # (rows - 1,)
        losses = np.full(len(self.positions), np.nan)
        for i, position in enumerate(self.positions):
            if position >= loss_from:
                losses[i] = nll[position - loss_from :].mean().item()
        return losses

    def _see_rows(self, call: AttentionCall) -> None:
        if has_entries(call):
            raise ValueError(
                f"layer {call.layer} also attends to keys that are not its tokens' own (compressed entries, or another "
                "layer's), which no intervention on a token reaches; such a model can only be diagnosed"
            )
        self.rows[call.layer] = rows_that_see(call)  # (T,)
        self.causal = self.causal and is_causal(call)

    def _see_attention(self, call: AttentionCall) -> None:
        sums = map_sums([call])
        received = (sums.columns[0] - sums.diagonal[0]) / self.rows[call.layer].clamp(min=1)  # (T,)
        self.received[call.layer] = received
        self.attention[call.layer] = received[self.positions]
        self.value_norms[call.layer] = self._ratios(m.value_norms(call.value[0]))  # (H, T, D) → (T,) → (P,)

    def _see_stream(self, stream: LayerStream) -> None:
        self.hidden_norms[stream.layer] = self._ratios(m.hidden_norms(stream.before))  # (T, C) → (T,) → (P,)
        if stream.mlp_update is not None:
            self.mlp[stream.layer] = m.l1_over_l2(stream.mlp_update)[self.positions]

    def _ratios(self, norms: Tensor) -> Tensor:
        """Return the norm of each position over the median of the others, (T,) → (P,)."""
        return torch.stack([m.over_median(norms, position) for position in self.positions])

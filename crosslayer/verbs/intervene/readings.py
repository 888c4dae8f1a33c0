"""Measures of a forward pass at the positions of an intervention, as samples and summarized for the record.

    attention received by k, in a layer:  mean over heads and over the rows i ≠ k that may see k of A_ik

In a causal model these rows are the tokens after k. They are those of the model's own mask, before any intervention.

Source: "Unveiling and Controlling Anomalous Attention Distribution in Transformers" (arXiv 2407.01601), 3 and 4.
Shapes: N sequences, T tokens, L layers, P measured positions.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from crosslayer.probe import measures as m
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.maps import is_causal, map_sums, rows_that_see
from crosslayer.probe.model import layer_stack, no_cache
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.stats.bootstrap import Ends, measure, plain
from crosslayer.verbs.diagnose.sequence import ByLayer, spread
from crosslayer.verbs.intervene.kinds import Kind, intervening
from crosslayer.verbs.intervene.result import Change, HeadRow, PositionChange, Reading, Role


@dataclass(frozen=True)
class Sample:
    """The readings of N sequences in float64; NaN where a layer has no such sublayer.

    `measures` are those of a `Reading` by name, (N, L, P), with `mlp_l1_l2` if some layer has a separate MLP, and
    `attention_by_head` (N, L, P, H). `received` (N, L, T) is the attention that every token receives, `last` (N, L, T)
    what the last one gives to each, and `last_by_head` the same for the heads of a layer, (H, T), mean over sequences.
    `loss_behind` (N, P) is the mean cross-entropy in nats of the predictions of the tokens after a position: None if it
    was not requested or the model does not predict next tokens, NaN for positions before the first one requested.
    """

    causal: bool
    measures: dict[str, np.ndarray]
    received: np.ndarray
    last: np.ndarray
    last_by_head: dict[int, np.ndarray]
    loss_behind: np.ndarray | None

    def reading(self, index: int, count: int | None = None) -> Reading:
        """Summarize the readings of measured position number `index` over the first `count` sequences."""
        names = [name for name in Reading.model_fields if name in self.measures]
        return Reading(**{name: measure(self.measures[name][:count, :, index]) for name in names})


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Sequence[int],
    interventions: Sequence[Kind] = (),
    loss_from: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Sample:
    """Return the readings of token ids (N, T), a sequence at a time, at P positions; the model is left unchanged.

    The loss is computed for the tokens after `loss_from`, by default not at all. `tick` is called after each sequence.
    """
    layers, observers, losses = len(layer_stack(model)), [], []
    last_by_head: ByLayer = {}
    for sequence in ids:
        observer = _Observer(model, positions)
        losses.append(observer.run(sequence, interventions, loss_from))
        # averaged at once, since those of N sequences would be large
        for layer, of_heads in observer.last_by_head.items():
            last_by_head[layer] = last_by_head.get(layer, 0) + of_heads / len(ids)
        observer.last_by_head.clear()
        observers.append(observer)
        tick()
    measures = {}
    for name, by_layer in observers[0].measures.items():
        if by_layer:
            measures[name] = np.stack([spread(observer.measures[name], layers) for observer in observers])
    causal = observers[0].causal
    return Sample(
        causal=causal,
        measures=measures,
        received=np.stack([spread(observer.received, layers) for observer in observers]),
        last=np.stack([spread(observer.last, layers) for observer in observers]),
        last_by_head={layer: of_heads.cpu().numpy() for layer, of_heads in last_by_head.items()},
        loss_behind=np.stack(losses) if causal and losses[0] is not None else None,
    )


class _Observer:
    """Measures a forward pass of one sequence: by layer, the measures (P,) and the attention received (T,)."""

    def __init__(self, model: PreTrainedModel, positions: Sequence[int]):
        self.model, self.positions = model, list(positions)
        self.causal = True
        self.rows: ByLayer = {}  # how many other rows may see each token
        self.received: ByLayer = {}
        self.last: ByLayer = {}
        self.last_by_head: ByLayer = {}  # (H, T)
        self.measures: dict[str, ByLayer] = {name: {} for name in (*Reading.model_fields, "attention_by_head")}

    def run(self, sequence: Tensor, interventions: Sequence[Kind], loss_from: int | None) -> np.ndarray | None:
        """Run the sequence, (T,).

        Return the mean cross-entropy of the predictions of the tokens after each position, in nats, (P,), NaN before
        `loss_from`; None if it is not requested.
        """
        ids = sequence[None].to(self.model.device)  # (1, T)
        with ExitStack() as stack:
            # Outermost: the masks before they are edited. What interventions do to attention is seen behind them.
            stack.enter_context(visited(self.model, self._count_rows))
            stack.enter_context(intervening(self.model, *interventions))
            stack.enter_context(visited(self.model, self._measure_attention))
            stack.enter_context(streams(self.model, self._measure_stream))
            if loss_from is None or not self.model.can_generate():
                self.model.base_model(input_ids=ids, **no_cache(self.model))
                return None
            # logits of the tokens before `loss_from` are not computed, if the model can do so
            count = ids.shape[1] - 1 - loss_from
            keep = {"logits_to_keep": count} if "logits_to_keep" in signature(self.model.forward).parameters else {}
            output = self.model(input_ids=ids, **no_cache(self.model), **keep)

        logits = output.logits[0, -count:-1].float()  # (count − 1, vocabulary)
        nll = cross_entropy(logits, ids[0, loss_from + 2 :], reduction="none").double()  # (count − 1,)
        if not nll.isfinite().all():
            raise ValueError("the loss is not finite; try another dtype such as float32")
        losses = np.full(len(self.positions), np.nan)
        for index, position in enumerate(self.positions):
            if position >= loss_from:
                losses[index] = nll[position - loss_from :].mean().item()
        return losses

    def _count_rows(self, call: AttentionCall) -> None:
        if call.key.shape[2] > call.query.shape[2]:
            raise ValueError(
                f"layer {call.layer} also attends to keys that are not its tokens' own (compressed entries, or another "
                "layer's keys), which interventions do not change; only diagnose supports this model"
            )
        self.rows[call.layer] = rows_that_see(call)  # (T,)
        self.causal = self.causal and is_causal(call)

    def _measure_attention(self, call: AttentionCall) -> None:
        sums = map_sums([call])
        by_head = (sums.columns_by_head[0] - sums.diagonal_by_head[0]) / self.rows[call.layer].clamp(min=1)  # (H, T)
        self.received[call.layer], self.last[call.layer] = by_head.mean(dim=0), sums.last[0]  # (T,)
        self.last_by_head[call.layer] = sums.last_by_head[0]  # (H, T)
        self.measures["attention_received"][call.layer] = by_head.mean(dim=0)[self.positions]
        self.measures["attention_by_head"][call.layer] = by_head[:, self.positions].T  # (P, H)
        norms = m.value_norms(call.value[0])  # (T,)
        ratios = [m.over_median(norms, position) for position in self.positions]
        self.measures["value_norm_ratio"][call.layer] = torch.stack(ratios)  # (P,)

    def _measure_stream(self, stream: LayerStream) -> None:
        norms = m.hidden_norms(stream.before)  # (T,)
        ratios = [m.over_median(norms, position) for position in self.positions]
        self.measures["hidden_norm_ratio"][stream.layer] = torch.stack(ratios)  # (P,)
        if stream.mlp_update is not None:
            self.measures["mlp_l1_l2"][stream.layer] = m.l1_over_l2(stream.mlp_update)[self.positions]


def changes_at(roles: dict[int, Role], before: Sample, after: Sample, over: Ends | None) -> list[PositionChange]:
    """Return the change at each measured position, with intervals over documents where `over` gives them."""
    positions = []
    for index, (position, role) in enumerate(roles.items()):
        changes = {}
        for name, sample in before.measures.items():
            changes[name] = change(sample[:, :, index], after.measures[name][:, :, index], over)
        if before.loss_behind is not None and after.loss_behind is not None:
            start, end = before.loss_behind[:, index], after.loss_behind[:, index]
            changes["loss_behind"] = None if np.isnan(start).all() else change(start, end, over)
        positions.append(PositionChange(position=position, role=role, **changes))
    return positions


def most_changed_head(position: int, before: Sample, after: Sample) -> HeadRow:
    """Return the last token's attention in the head where its attention to a position changes most."""
    changes = {
        layer: np.abs(of_heads[:, position] - before.last_by_head[layer][:, position])  # (H,)
        for layer, of_heads in after.last_by_head.items()
    }
    layer = max(changes, key=lambda layer: changes[layer].max())
    head = int(changes[layer].argmax())
    start, end = before.last_by_head[layer][head], after.last_by_head[layer][head]  # (T,)
    return HeadRow(layer=layer, head=head, before=plain(start), after=plain(end))


def change(before: np.ndarray, after: np.ndarray, over: Ends | None = None) -> Change:
    """Summarize readings by layer, (N, L) or (N, L, H) each, and their paired difference."""
    return Change(before=measure(before, over), after=measure(after, over), difference=measure(after - before, over))

"""What an intervention does: the same sequences before and under it, measured at the positions that it is about.

    attention received by k, in one layer:  mean over heads and over the rows i ≠ k that may see k of A_ik

For a causal model these rows are the tokens behind k. Beside the change itself stand the first token, tokens left
alone, controls (the same change elsewhere, or with random content) and a scan: the change in a range of layers only.

Source: "Unveiling and Controlling Anomalous Attention Distribution in Transformers" (Yan et al. 2024), 3 and 4.
Shapes: N sequences, T tokens, L layers, P watched positions.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from crosslayer.environment import environment
from crosslayer.intervention.apply import (
    KINDS,
    Ablate,
    Forbid,
    PositionSwap,
    ScaleValues,
    TokenSwap,
    Waiver,
    check_positions,
    intervene,
    positions_of,
    to_entry,
)
from crosslayer.output.summary import by_position, summarise
from crosslayer.plan import parse_layers
from crosslayer.probe import measures as m
from crosslayer.probe.intercept import AttentionCall, attention_layers, evaluating, layer_stack, no_cache, visited
from crosslayer.probe.maps import is_causal, map_sums, rows_that_see
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.probe.tokens import check_ids, position_limit

MEASURES = ("attention_received", "hidden_norm_ratio", "value_norm_ratio", "mlp_l1_l2")
BELOW, ABOVE = (0.1, 0.25, 0.5), (0.1, 0.25)  # of the depth: where the groups of a scan end and begin
LAYERED = (Waiver, Forbid, ScaleValues)
Progress = Callable[[int, int], None]  # forward passes done, in all


@dataclass(frozen=True)
class Effect:
    """What `effect` found; arrays are (N, L, P) by measure, with `loss_behind` (N, P) and `received` (N, L, T)."""

    model: dict[str, Any]
    settings: dict[str, Any]
    interventions: Sequence[KINDS]
    watched: dict[int, str]  # position -> "intervened", "first token" or "left alone"
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    scan: list[dict[str, Any]]
    controls: list[dict[str, Any]]
    seconds: float
    made_with: dict[str, Any] = field(default_factory=environment)

    def record(self) -> dict[str, Any]:
        """Return everything as plain data; this is what `record.json` holds."""
        places = [{"position": p, "role": role, **self.at(i)} for i, (p, role) in enumerate(self.watched.items())]
        chosen = {key: value for key, value in places[0].items() if key != "role"}
        sides = {"before": self.before, "after": self.after}
        heat = {name: by_position(side["received"], self.watched) for name, side in sides.items()}
        return {
            "schema": "crosslayer/intervention/1",
            "model": self.model,
            "settings": self.settings,
            "interventions": [to_entry(one) for one in self.interventions],
            **chosen,
            "others": places[1:],
            "attention_by_position": {
                "edges": heat["before"].edges,
                "length": heat["before"].length,
                "before": heat["before"].mean,
                "after": heat["after"].mean,
            },
            "scan": self.scan,
            "controls": self.controls,
            "seconds": self.seconds,
            "environment": self.made_with,
        }

    def at(self, index: int) -> dict[str, Any]:
        """Return every measure of one watched position: before, after, and the paired difference."""
        found: dict[str, Any] = {}
        for name in (*MEASURES, "loss_behind"):
            sides = [side[name][..., index] if name in side else None for side in (self.before, self.after)]
            found[name] = _pair(*sides)
        return found


@torch.no_grad()
def effect(
    model: PreTrainedModel,
    ids: Tensor,
    *interventions: KINDS,
    scan: Sequence[Sequence[int]] | None = None,
    controls: int = 2,
    probes: int | None = None,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Effect:
    """Measure what `interventions` do to sinks, drains, peaks and the loss; the model is left unchanged.

    Args:
        model: any model that `intervene` and `diagnose` take.
        ids: token ids (N, T), no padding.
        interventions: entered together; the record is about the first position of the first.
        scan: groups of layers; the interventions are tried in each group alone. Default: below a tenth, a quarter and
            half of the depth, above a tenth and a quarter; [] for none. Only those that act by layer are scanned.
        controls: how often the same is tried elsewhere, all positions shifted alike (a swap: random row or token).
        probes: sequences of scan and controls, the first of all; default 2, if there are so many.
        seed: of the random positions and contents.
        settings: what the record should say about the run, beside what is known here.
        progress: called after each forward pass.

    Raises:
        ValueError: a position is outside of the sequences (of a causal model: has fewer than two tokens behind it), a
            layer does not exist, the model cannot be probed, or `intervene` refuses.

    """
    started = time.perf_counter()
    check_ids(model, ids)
    probes = min(2, len(ids)) if probes is None else probes
    _check(model, ids, interventions, probes)
    positions = [p for one in interventions for p in positions_of(one)]
    draw, few, main = np.random.default_rng(seed), ids[:probes], positions[0]
    alone, tried = _controls(model, interventions, ids.shape[1], controls, draw)
    watched = {0: "first token"} | dict.fromkeys(alone, "left alone") | dict.fromkeys(positions, "intervened")
    watched = {p: watched[p] for p in (*positions, 0, *alone)}
    scanned = _scan(model, interventions, scan)
    with intervene(model, *interventions):
        pass  # what cannot be done is said before anything is measured
    runs = _Runs(model, 2 * len(ids) + probes * (len(scanned) + len(tried)), progress)
    with evaluating(model):
        after = runs.all(ids, list(watched), interventions, behind=min(positions))  # first: it may refuse
        before = runs.all(ids, list(watched), (), behind=min(positions))
        at = {p: _at(before, i, probes) for i, p in enumerate(watched)}
        scans = runs.scan(few, main, scanned)
        if scans:
            everywhere = sorted({layer for one in interventions for layer in _layers(model, one)})
            scans = [{"layers": [], **at[main]}, *scans, {"layers": everywhere, **_at(after, 0, probes)}]
        found = runs.controls(few, tried, at)
    return Effect(
        model={
            "class": type(model).__name__,
            "type": model.config.model_type,
            "layers": runs.layers,
            "hidden_size": model.config.get_text_config().hidden_size,
            "causal": runs.causal,
        },
        settings={"sequences": len(ids), "length": ids.shape[1], "probes": probes, "seed": seed, **(settings or {})},
        interventions=interventions,
        watched=watched,
        before=before,
        after=after,
        scan=scans,
        controls=found,
        seconds=time.perf_counter() - started,
    )


class _Runs:
    """Runs sequences one at a time, under interventions, and measures them."""

    def __init__(self, model: PreTrainedModel, total: int, progress: Progress | None):
        self.model, self.total, self.progress, self.done = model, total, progress, 0
        self.causal, self.layers = False, len(layer_stack(model))

    def all(
        self, ids: Tensor, positions: list[int], change: Sequence[KINDS], behind: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return every measure with the sequences in front, (N, …); the loss from the tokens after `behind` on."""
        found = []
        for sequence in ids:
            look = _Look(self.model, positions)
            found.append(look.run(sequence, change, behind))
            self.causal, self.done = look.causal, self.done + 1
            if self.progress is not None:
                self.progress(self.done, self.total)
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def one(self, ids: Tensor, position: int, change: Sequence[KINDS]) -> dict[str, Any]:
        """Return the measures of one position under a change."""
        return _at(self.all(ids, [position], change), 0, len(ids))

    def scan(
        self, ids: Tensor, position: int, changes: dict[tuple[int, ...], tuple[KINDS, ...]]
    ) -> list[dict[str, Any]]:
        """Return the measures of one position under the change in each group of layers."""
        return [{"layers": list(group), **self.one(ids, position, change)} for group, change in changes.items()]

    def controls(
        self, ids: Tensor, changes: list[tuple[KINDS, ...]], before: dict[int, dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return what each control does to its own first position."""
        found = []
        for change in changes:
            place, entries = positions_of(change[0])[0], [to_entry(one) for one in change]
            sides = {"before": before[place], "after": self.one(ids, place, change)}
            found.append({"interventions": entries, "position": place, **sides})
        return found


class _Look:
    """One forward pass of one sequence; what is found is NaN where a layer has no such sublayer."""

    def __init__(self, model: PreTrainedModel, positions: list[int]):
        self.model, self.positions, self.layers = model, positions, len(layer_stack(model))
        self.rows: dict[int, Tensor] = {}
        self.found: dict[str, dict[int, Tensor]] = {}
        self.causal = True

    def run(self, sequence: Tensor, change: Sequence[KINDS], behind: int | None) -> dict[str, np.ndarray]:
        """Return the measures, (L, P), with `received` (L, T) and, where it is defined, `loss_behind` (P,)."""
        ids = sequence[None].to(self.model.device)
        with ExitStack() as stack:
            stack.enter_context(visited(self.model, self._see_rows))  # outermost: the masks as they are
            stack.enter_context(intervene(self.model, *change))
            stack.enter_context(visited(self.model, self._see_attention))
            stack.enter_context(streams(self.model, self._see_stream))
            losses = None if behind is None or not self.model.can_generate() else self._loss(ids, behind)
            if losses is None:
                self.model.base_model(input_ids=ids, **no_cache(self.model))
        found = {name: self._spread(by_layer) for name, by_layer in self.found.items()}
        return found if losses is None or not self.causal else {**found, "loss_behind": losses}

    def _loss(self, ids: Tensor, behind: int) -> np.ndarray:
        """Return the mean cross-entropy of what the tokens behind each position predict, in nats, (P,).

        Logits are computed behind `behind` only, where the model can; positions before it get NaN.
        """
        rows = ids.shape[1] - 1 - behind
        keep = {"logits_to_keep": rows} if "logits_to_keep" in signature(self.model.forward).parameters else {}
        logits = self.model(input_ids=ids, **no_cache(self.model), **keep).logits[0, -rows:-1].float()
        nll = cross_entropy(logits, ids[0, behind + 2 :], reduction="none").double()
        return np.array([nll[p - behind :].mean().item() if p >= behind else np.nan for p in self.positions])

    def _see_rows(self, call: AttentionCall) -> None:
        self.rows[call.layer] = rows_that_see(call)
        self.causal &= is_causal(call)

    def _see_attention(self, call: AttentionCall) -> None:
        sums = map_sums([call])
        received = (sums.columns[0] - sums.diagonal[0]) / self.rows[call.layer].clamp(min=1)
        norms = m.value_norms(call.value[0])
        self._keep("received", call.layer, received)
        self._keep("attention_received", call.layer, received[self.positions])
        self._keep("value_norm_ratio", call.layer, torch.stack([m.over_median(norms, p) for p in self.positions]))

    def _see_stream(self, stream: LayerStream) -> None:
        norms = m.hidden_norms(stream.before)
        self._keep("hidden_norm_ratio", stream.layer, torch.stack([m.over_median(norms, p) for p in self.positions]))
        if stream.mlp_update is not None:
            self._keep("mlp_l1_l2", stream.layer, m.l1_over_l2(stream.mlp_update)[self.positions])

    def _keep(self, name: str, layer: int, value: Tensor) -> None:
        self.found.setdefault(name, {})[layer] = value

    def _spread(self, by_layer: dict[int, Tensor]) -> np.ndarray:
        full = np.full((self.layers, len(next(iter(by_layer.values())))), np.nan)
        for layer, value in by_layer.items():
            full[layer] = value.double().cpu().numpy()
        return full


def _check(model: PreTrainedModel, ids: Tensor, interventions: Sequence[KINDS], probes: int) -> None:
    positions, size = [p for one in interventions for p in positions_of(one)], ids.shape[1]
    check_positions(interventions, size)
    if model.can_generate() and max(positions) > size - 3:
        raise ValueError(f"position {max(positions)} needs two tokens behind it; sequences have {size} tokens")
    if not 1 <= probes <= len(ids):
        raise ValueError(f"probes = {probes}; use 1 to {len(ids)}, the number of sequences")


def _controls(
    model: PreTrainedModel, interventions: Sequence[KINDS], size: int, count: int, draw: np.random.Generator
) -> tuple[list[int], list[tuple[KINDS, ...]]]:
    """Return positions that are left alone, and the controls: all positions shifted to them, swaps at random."""
    positions = [p for one in interventions for p in positions_of(one)]
    room = range(1, size - 3)  # neither the first token nor the last ones
    shifts = [s for s in room if not {_shifted(p, s, size) for p in positions} & set(positions)]
    chosen = [int(s) for s in draw.choice(shifts, min(count, len(shifts)), replace=False)]
    tried = [tuple(_elsewhere(model, one, shift, size, draw) for one in interventions) for shift in chosen]
    return [_shifted(positions[0], shift, size) for shift in chosen], tried


def _shifted(position: int, shift: int, size: int) -> int:
    return 1 + (position - 1 + shift) % (size - 3)


def _elsewhere(model: PreTrainedModel, one: KINDS, shift: int, size: int, draw: np.random.Generator) -> KINDS:
    """Return an intervention at other positions; a swap at its own, with a random row or token."""
    if isinstance(one, PositionSwap):
        rows = [row for row in range(position_limit(model) or 0) if row not in (one.position, one.source)]
        return PositionSwap(one.position, int(draw.choice(rows)))
    if isinstance(one, TokenSwap):
        return TokenSwap(one.position, "random", int(draw.integers(2**31)))
    if isinstance(one, Ablate):
        return dataclasses.replace(one, position=_shifted(one.position, shift, size))
    return dataclasses.replace(one, positions=tuple(_shifted(p, shift, size) for p in one.positions))


def _layers(model: PreTrainedModel, one: KINDS) -> Sequence[int]:
    """Return the layers in which an intervention acts, none if it does not act by layer."""
    if not isinstance(one, LAYERED):
        return ()
    return attention_layers(model.config) if one.layers == "all" else one.layers


def _scan(
    model: PreTrainedModel, interventions: Sequence[KINDS], groups: Sequence[Sequence[int]] | None
) -> dict[tuple[int, ...], tuple[KINDS, ...]]:
    """Return what to run in each group of layers alone, without the groups in which nothing acts or all does."""
    layers, own = len(layer_stack(model)), {layer for one in interventions for layer in _layers(model, one)}
    wrong = [layer for group in groups or () for layer in group if not 0 <= layer < layers]
    if wrong:
        raise ValueError(f"scan: layer {wrong[0]} does not exist; layers go from 0 to {layers - 1}")
    if groups and not own:
        raise ValueError("scan: none of the interventions acts by layer, so there is nothing to scan; leave it out")
    if groups is None:
        below, above = (sorted({max(1, round(layers * cut)) for cut in cuts}) for cuts in (BELOW, ABOVE))
        groups = [range(cut) for cut in below] + [range(cut, layers) for cut in above]
    found = {}
    for group in groups:
        acting = tuple(layer for layer in group if layer in own)
        if acting and set(acting) != own:
            changes = [_within(model, one, acting) for one in interventions]
            found[acting] = tuple(one for one in changes if one is not None)
    return found


def scan_groups(text: str, layers: int) -> list[list[int]] | None:
    """Read the groups of a scan: "auto" (None), "none" (empty), or ranges such as "0-11,12-29", which may overlap."""
    if text == "auto":
        return None
    return [] if text == "none" else [parse_layers(part, layers)[0] for part in text.split(",")]


def _within(model: PreTrainedModel, one: KINDS, group: Sequence[int]) -> KINDS | None:
    """Return an intervention in those of its layers that are in the group, None if there are none."""
    if not isinstance(one, LAYERED):
        return one
    own = tuple(layer for layer in group if layer in _layers(model, one))
    return dataclasses.replace(one, layers=own) if own else None


def _at(found: dict[str, np.ndarray], index: int, probes: int) -> dict[str, Any]:
    """Summarise the measures of one watched position over the first sequences."""
    return {name: summarise(found[name][:probes, :, index]) for name in MEASURES if name in found}


def _pair(before: np.ndarray | None, after: np.ndarray | None) -> dict[str, Any] | None:
    """Summarise (N, …) before, after, and their paired difference."""
    if before is None or after is None or np.isnan(before).all():
        return None
    return {"before": summarise(before), "after": summarise(after), "difference": summarise(after - before)}

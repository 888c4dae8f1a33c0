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
from crosslayer.intervene import (
    KINDS,
    Ablate,
    Forbid,
    PositionSwap,
    ScaleValues,
    TokenSwap,
    Waiver,
    intervene,
    positions_of,
    to_entry,
)
from crosslayer.plan import parse_layers
from crosslayer.probe import measures as m
from crosslayer.probe.maps import is_causal, map_sums, rows_that_see
from crosslayer.probe.scan import by_position, check_ids, evaluating, summarise
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.probe.tokens import position_limit
from crosslayer.probe.visit import AttentionCall, layer_stack, no_cache, visited

MEASURES = ("attention_received", "hidden_norm_ratio", "value_norm_ratio", "mlp_l1_l2")
BEHIND = 64  # tokens behind a position, over which scan and controls measure a causal model
CUTS = (0.1, 0.25, 0.5)  # of the depth: the scan isolates below and above each
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
                "edges": heat["before"]["edges"],
                "length": heat["before"]["length"],
                "before": heat["before"]["mean"],
                "after": heat["after"]["mean"],
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
    probes: int = 2,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Effect:
    """Measure what `interventions` do to sinks, drains, peaks and the loss; the model is left unchanged.

    Args:
        model: any model that `intervene` and `diagnose` take.
        ids: token ids (N, T), no padding.
        interventions: entered together; the record is about the first position of the first.
        scan: groups of layers; the interventions are tried in each group alone. Default: below and above a tenth, a
            quarter and half of the depth; [] for none. Only those that act by layer are scanned.
        controls: how often the same is tried elsewhere (a swap: with a random row or token).
        probes: sequences of scan and controls; a causal model runs them up to 64 tokens behind the position.
        seed: of the random positions and contents.
        settings: what the record should say about the run, beside what is known here.
        progress: called after each forward pass.

    Raises:
        ValueError: a position has fewer than two tokens behind it, a layer does not exist, the model cannot be probed,
            or `intervene` refuses.

    """
    started = time.perf_counter()
    check_ids(model, ids)
    _check(ids, interventions, probes)
    layers, positions = len(layer_stack(model)), [p for one in interventions for p in positions_of(one)]
    draw = np.random.default_rng(seed)
    alone = _others(positions, ids.shape[1], controls, draw)
    watched = {0: "first token"} | dict.fromkeys(alone, "left alone") | dict.fromkeys(positions, "intervened")
    watched = {p: watched[p] for p in (*positions, 0, *alone)}
    scanned = _scan(interventions, scan, layers)
    tried = [tuple(_elsewhere(model, one, p, draw) for one in interventions) for p in alone]
    with intervene(model, *interventions):
        pass  # what cannot be done is said before anything is measured
    runs = _Runs(model, 2 * len(ids) + probes * (len(scanned) + 2 * len(tried)), progress)
    with evaluating(model):
        before = runs.all(ids, list(watched), (), loss=True)
        after = runs.all(ids, list(watched), interventions, loss=True)
        scans = [
            {"layers": list(chosen), **runs.short(ids[:probes], positions[0], change)}
            for chosen, change in scanned.items()
        ]
        found = [runs.control(ids[:probes], change) for change in tried]
    return Effect(
        model={"class": type(model).__name__, "type": model.config.model_type, "layers": layers, "causal": runs.causal},
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
        self.causal = False

    def all(self, ids: Tensor, positions: list[int], change: Sequence[KINDS], loss: bool) -> dict[str, np.ndarray]:
        """Return every measure with the sequences in front, (N, …)."""
        found = []
        for sequence in ids:
            look = _Look(self.model, positions)
            found.append(look.run(sequence, change, loss))
            self.causal, self.done = look.causal, self.done + 1
            if self.progress is not None:
                self.progress(self.done, self.total)
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def short(self, ids: Tensor, position: int, change: Sequence[KINDS]) -> dict[str, Any]:
        """Return the measures of one position; of a causal model, from the text up to `BEHIND` tokens behind it."""
        found = self.all(ids[:, : position + 1 + BEHIND] if self.causal else ids, [position], change, loss=False)
        return {name: summarise(found[name][..., 0]) for name in MEASURES if name in found}

    def control(self, ids: Tensor, change: tuple[KINDS, ...]) -> dict[str, Any]:
        """Return the measures of a control, before and after."""
        position = positions_of(change[0])[0]
        sides = {"before": self.short(ids, position, ()), "after": self.short(ids, position, change)}
        return {"interventions": [to_entry(one) for one in change], "position": position, **sides}


class _Look:
    """One forward pass of one sequence; what is found is NaN where a layer has no such sublayer."""

    def __init__(self, model: PreTrainedModel, positions: list[int]):
        self.model, self.positions, self.layers = model, positions, len(layer_stack(model))
        self.rows: dict[int, Tensor] = {}
        self.found: dict[str, dict[int, Tensor]] = {}
        self.causal = True

    def run(self, sequence: Tensor, change: Sequence[KINDS], loss: bool) -> dict[str, np.ndarray]:
        """Return the measures, (L, P), with `received` (L, T) and, if wanted and defined, `loss_behind` (P,)."""
        ids = sequence[None].to(self.model.device)
        with ExitStack() as stack:
            stack.enter_context(visited(self.model, self._see_rows))  # outermost: the masks as they are
            stack.enter_context(intervene(self.model, *change))
            stack.enter_context(visited(self.model, self._see_attention))
            stack.enter_context(streams(self.model, self._see_stream))
            losses = self._loss(ids) if loss and self.model.can_generate() else None
            if losses is None:
                self.model.base_model(input_ids=ids, **no_cache(self.model))
        found = {name: self._spread(by_layer) for name, by_layer in self.found.items()}
        return found if losses is None or not self.causal else {**found, "loss_behind": losses}

    def _loss(self, ids: Tensor) -> np.ndarray:
        """Return the mean cross-entropy of what the tokens behind each position predict, in nats, (P,)."""
        first = min(self.positions) + 1
        keep = (
            {"logits_to_keep": ids.shape[1] - first}
            if "logits_to_keep" in signature(self.model.forward).parameters
            else {}
        )
        logits = self.model(input_ids=ids, **no_cache(self.model), **keep).logits[0, first - ids.shape[1] : -1].float()
        nll = cross_entropy(logits, ids[0, first + 1 :], reduction="none").double()
        return np.array([nll[p + 1 - first :].mean().item() for p in self.positions])

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


def _check(ids: Tensor, interventions: Sequence[KINDS], probes: int) -> None:
    positions = [p for one in interventions for p in positions_of(one)]
    if not positions:
        raise ValueError("there is nothing to do; give an intervention, such as waiver(255)")
    if max(positions) > ids.shape[1] - 3:
        raise ValueError(f"position {max(positions)} needs two tokens behind it; sequences have {ids.shape[1]} tokens")
    if not 1 <= probes <= len(ids):
        raise ValueError(f"probes = {probes}; use 1 to {len(ids)}, the number of sequences")


def _others(positions: list[int], length: int, count: int, draw: np.random.Generator) -> list[int]:
    """Draw positions that are left alone, away from both ends where there is room."""
    free = [p for p in range(max(1, length // 8), length - max(2, length // 8)) if p not in positions]
    return [int(p) for p in draw.choice(free, min(count, len(free)), replace=False)]


def _scan(
    interventions: Sequence[KINDS], groups: Sequence[Sequence[int]] | None, layers: int
) -> dict[tuple[int, ...], tuple[KINDS, ...]]:
    """Return what to run in each group of layers alone; nothing where no intervention acts by layer."""
    if not any(isinstance(one, LAYERED) for one in interventions):
        return {}
    if groups is None:
        cuts = sorted({max(1, round(layers * cut)) for cut in CUTS})
        groups = [range(cut) for cut in cuts] + [range(cut, layers) for cut in cuts]
    wrong = [layer for group in groups for layer in group if not 0 <= layer < layers]
    if wrong:
        raise ValueError(f"scan: layer {wrong[0]} does not exist; layers go from 0 to {layers - 1}")
    found = {tuple(group): tuple(_within(one, group, layers) for one in interventions) for group in groups}
    acting = {group: tuple(one for one in change if not _idle(one)) for group, change in found.items()}
    return {group: change for group, change in acting.items() if any(isinstance(one, LAYERED) for one in change)}


def scan_groups(text: str, layers: int) -> list[list[int]] | None:
    """Read the groups of a scan: "auto" (None), "none" (empty), or ranges such as "0-11,12-29", which may overlap."""
    if text == "auto":
        return None
    return [] if text == "none" else [parse_layers(part, layers)[0] for part in text.split(",")]


def _within(one: KINDS, group: Sequence[int], layers: int) -> KINDS:
    """Return an intervention in those of its layers that are in the group."""
    if not isinstance(one, LAYERED):
        return one
    own = range(layers) if one.layers == "all" else one.layers
    return dataclasses.replace(one, layers=tuple(layer for layer in group if layer in own))


def _idle(one: KINDS) -> bool:
    return isinstance(one, LAYERED) and one.layers == ()


def _elsewhere(model: PreTrainedModel, one: KINDS, position: int, draw: np.random.Generator) -> KINDS:
    """Return the control of an intervention: the same at another position, or a swap with random content."""
    if isinstance(one, PositionSwap):
        return PositionSwap(one.position, int(draw.integers(position_limit(model) or 1)))
    if isinstance(one, TokenSwap):
        return TokenSwap(one.position, "random", int(draw.integers(2**31)))
    if isinstance(one, Ablate):
        return dataclasses.replace(one, position=position)
    return dataclasses.replace(one, positions=(position,))


def _pair(before: np.ndarray | None, after: np.ndarray | None) -> dict[str, Any] | None:
    """Summarise (N, …) before, after, and their paired difference."""
    if before is None or after is None:
        return None
    return {"before": summarise(before), "after": summarise(after), "difference": summarise(after - before)}

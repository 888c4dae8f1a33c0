"""Measure the effect of interventions: the same sequences before and after, at the positions that they change.

The first token and untouched tokens are measured too, with controls (the same change at other positions, or with
random content) and a scan (the change in some layers only).

Shapes: N sequences, T tokens, L layers, P measured positions.
"""

import dataclasses
import itertools
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.options import parse_layers
from crosslayer.corpus.windows import Text
from crosslayer.output.progress import progress
from crosslayer.output.record import Options, Seed
from crosslayer.probe.model import evaluating, layer_stack, position_limit, unwrapped
from crosslayer.stats.bootstrap import by_position, over_documents
from crosslayer.verbs.diagnose.run import Inputs, default_length, read_inputs
from crosslayer.verbs.intervene.kinds import (
    Ablate,
    InAttention,
    Intervention,
    Kind,
    PositionSwap,
    TokenSwap,
    acting_layers,
    intervening,
    load_intervention,
    positions_of,
)
from crosslayer.verbs.intervene.readings import changes_at, most_changed_head, sample
from crosslayer.verbs.intervene.result import (
    PROBED,
    AttentionByPosition,
    Control,
    Effect,
    IntervenedModel,
    Role,
    Settings,
    Trial,
)

# More layers than any model has: the limit of layer indices before the model is loaded.
DEEPEST = 10_000
# Shares of the depth where groups of a scan end and begin. Early layers decide: in SmolLM2 a waiver in layers 0-2 of 30
# makes a sink (11% of attention over all layers), in layers 12-29 none.
BELOW, ABOVE = (0.1, 0.25, 0.5), (0.1, 0.25)

Kinds = tuple[Kind, ...]


def intervene(
    model: PreTrainedModel | str | Path,
    text: Text = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    interventions: Sequence[Kind | Mapping[str, Any]],
    scan: str | Sequence[Sequence[int]] = "auto",
    controls: int = 2,
    sequences: int = 8,
    length: int | None = None,
    seed: int = 0,
    bos: str = "auto",
    prefix: str | Sequence[int] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Effect:
    """Move, create or remove an attention sink, and measure the effect layer by layer.

    The model does not change.

    Args:
        model: hub name, local folder, smollm2, qwen, gemma3 or minilm. In Python also a loaded model.
        text: a .txt, .md, .jsonl or .parquet file, a folder of them, or a Hugging Face dataset:
            NAME,config=…,split=…,column=…; default: the embedded corpus. In Python also token ids (B, T), T ≥ 2,
            without padding, a `TextSource` or texts.
        tokenizer: in Python, the tokenizer of a loaded model.
        interventions: in Python, the changes, as objects or plain data from a record, applied together; the result
            describes the first position of the first intervention.
        scan: repeat the interventions in each of these ranges of layers, such as 0-2,3-29; or none; or auto: the first
            10%, 25% and 50% of layers, and all but the first 10% and 25%. In Python also groups of layers.
        controls: control runs with all positions shifted by a random distance (swaps: with a random row or token).
        sequences: sequences to measure; confidence intervals need at least two.
        length: tokens per sequence; default: 512, or as many as the model has positions.
        seed: random seed for the order of the text and for the controls.
        bos: whether sequences start with the BOS token: auto (as the tokenizer does), yes or no.
        prefix: text that every sequence begins with; chat: the chat template's. In Python also token ids.
        dtype: float32, bfloat16, …; default: float32 on a CPU. In Python only if `model` is a name or path.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only if `model` is a name or path.

    Raises:
        ValueError: an option, position or layer is invalid (a causal model needs two tokens after every position), the
            text cannot be read, or the model cannot be loaded or does not support the interventions.
    """
    model = unwrapped(model)
    if isinstance(text, Tensor) and text.dim() == 2:
        sequences, length = text.shape
    elif length is None:
        length = default_length(text, model)
    request = Request.of(
        interventions=interventions, scan=scan, controls=controls, sequences=sequences, length=length, seed=seed
    )
    inputs = read_inputs(
        model,
        text,
        tokenizer,
        sequences=sequences,
        length=length,
        seed=seed,
        bos=bos,
        prefix=prefix,
        dtype=dtype,
        device=device,
    )
    return _measure(inputs, request)


class Request(Options):
    """The options of `crosslayer.intervene`, checked before a model is loaded."""

    interventions: Kinds
    scan: str | tuple[tuple[int, ...], ...] = "auto"
    controls: int = Field(2, ge=0)
    sequences: int = Field(8, ge=1)
    length: int = Field(512, ge=2)
    seed: Seed = 0

    @field_validator("interventions", mode="before")
    @classmethod
    def _load_entries(cls, interventions: Any) -> Any:
        """Build interventions from plain data."""
        if isinstance(interventions, Intervention | Mapping) or not isinstance(interventions, Iterable):
            raise ValueError(f"interventions must be a list such as [waiver(255)], got {interventions!r}")
        return tuple(load_intervention(each) if isinstance(each, Mapping) else each for each in interventions)

    @field_validator("scan", mode="before")
    @classmethod
    def _read_groups(cls, scan: Any) -> Any:
        """Turn groups of any type, such as ranges, into tuples; check that a text is a list of ranges."""
        if isinstance(scan, str):
            _groups(scan, DEEPEST)
            return scan
        try:
            return tuple(tuple(map(operator.index, group)) for group in scan)
        except TypeError:
            groups = "groups of layers such as [[0, 1, 2], [3, 4]]"
            raise ValueError(
                f"`scan` must be auto, none, ranges such as '0-2,3-29' or {groups}, got {scan!r}"
            ) from None

    @model_validator(mode="after")
    def _check_positions(self) -> "Request":
        """Raise if there are no positions, or if positions exceed the sequences."""
        if not self.positions:
            raise ValueError("an intervention is missing; give at least one, such as waiver(255)")
        last = max(self.positions)
        if last >= self.length:
            raise ValueError(f"position {last} is outside the sequences, which have {self.length} tokens")
        return self

    @property
    def positions(self) -> tuple[int, ...]:
        """All positions that are changed, in the order of the interventions."""
        return tuple(position for intervention in self.interventions for position in positions_of(intervention))


def _measure(inputs: Inputs, request: Request) -> Effect:
    """Run all sequences, (N, T), before and after the interventions, and the first `PROBED` in scan and controls."""
    started, interventions = time.perf_counter(), request.interventions
    model, ids, probed = inputs.model, inputs.ids, inputs.ids[:PROBED]
    last = max(request.positions)
    if model.can_generate() and last > request.length - 3:
        raise ValueError(f"position {last} needs two tokens after it, and sequences have {request.length} tokens")
    # raises early if the model does not support them
    with intervening(model, *interventions):
        pass
    controls, groups = shifted(model, request), scanned(model, request)
    roles: dict[int, Role] = dict.fromkeys(request.positions, "intervened")
    roles.setdefault(0, "first token")
    for untouched, _ in controls:
        roles.setdefault(untouched, "left alone")
    measured, first = [*roles], min(request.positions)  # the main position comes first
    total = 2 * len(ids) + len(probed) * (len(groups) + len(controls))
    with progress("running", total) as steps, evaluating(model):
        done = itertools.count(1)
        read = partial(sample, model, tick=lambda: steps.step(next(done), total))
        # before all else: it may raise
        after = read(ids, measured, interventions, first)
        before = read(ids, measured, (), first)
        scan = []
        for layers, within in groups.items():
            scan.append(Trial(layers=list(layers), **dict(read(probed, measured[:1], within).reading(0))))
        control_runs = []
        for _, moved in controls:
            position = positions_of(moved[0])[0]  # swaps keep their position
            start, end = before.reading(measured.index(position), PROBED), read(probed, [position], moved)
            control_runs.append(
                Control(interventions=list(moved), position=position, before=start, after=end.reading(0))
            )
    # between no layers and all layers in which the interventions act, which are measured already
    if scan:
        everywhere = sorted({layer for intervention in interventions for layer in acting_layers(model, intervention)})
        nowhere = Trial(layers=[], **dict(before.reading(0, PROBED)))
        scan = [nowhere, *scan, Trial(layers=everywhere, **dict(after.reading(0, PROBED)))]
    single = {*roles, *range(len(inputs.settings.prefix))}
    received, last_row = (
        AttentionByPosition(before=by_position(start, single), after=by_position(end, single))
        for start, end in ((before.received, after.received), (before.last, after.last))
    )
    return Effect(
        model=IntervenedModel(**dict(inputs.facts), causal=before.causal),
        settings=Settings.model_validate({**dict(inputs.settings), "seed": request.seed}),
        interventions=list(interventions),
        positions=changes_at(roles, before, after, over_documents(inputs.settings.documents)),
        attention_by_position=received,
        last_row_by_position=last_row,
        last_row_of_head=most_changed_head(measured[0], before, after),
        scan=scan,
        controls=control_runs,
        seconds=time.perf_counter() - started,
    )


def _groups(scan: str, depth: int) -> list[list[int]]:
    """Return the groups of a scan: "auto", "none" (empty), or ranges such as "0-11,12-29", which may overlap."""
    if scan != "auto":
        return [] if scan == "none" else [parse_layers(text, depth)[0] for text in scan.split(",")]
    below, above = (sorted({max(1, round(depth * share)) for share in shares}) for shares in (BELOW, ABOVE))
    return [[*range(end)] for end in below] + [[*range(start, depth)] for start in above]


def scanned(model: PreTrainedModel, request: Request) -> dict[tuple[int, ...], Kinds]:
    """Return the interventions by group of layers, without groups where none or all of their layers are included."""
    depth, scan = len(layer_stack(model)), request.scan
    groups = _groups(scan, depth) if isinstance(scan, str) else scan
    everywhere = {layer for intervention in request.interventions for layer in acting_layers(model, intervention)}
    for layer in (layer for group in groups for layer in group):
        if not 0 <= layer < depth:
            raise ValueError(f"`scan`: layer {layer} does not exist: the model has layers 0 to {depth - 1}")
    if groups and not everywhere and scan != "auto":
        raise ValueError("`scan` needs an intervention that acts by layer: waiver, forbid or scale_values")
    trials = {}
    for group in groups:
        acting = tuple(layer for layer in group if layer in everywhere)
        if acting and set(acting) != everywhere:
            changes: list[Kind] = []  # without those that act in no layer of the group
            for intervention in request.interventions:
                layers = tuple(layer for layer in acting if layer in acting_layers(model, intervention))
                if not isinstance(intervention, InAttention):
                    changes.append(intervention)
                elif layers:
                    changes.append(dataclasses.replace(intervention, layers=layers))
            trials[acting] = tuple(changes)
    return trials


def shifted(model: PreTrainedModel, request: Request) -> list[tuple[int, Kinds]]:
    """Return the controls: the shifted main position, which no intervention changes, and the interventions there.

    All positions are shifted by the same distance; swaps get random content instead. The new positions are neither the
    first token of a sequence nor the last ones.
    """
    draw, length, positions = np.random.default_rng(request.seed), request.length, request.positions
    free = []  # shifts that bring no position to a place that is changed already
    for shift in range(1, length - 3):
        if not {_moved(position, shift, length) for position in positions} & set(positions):
            free.append(shift)
    shifts = [int(shift) for shift in draw.choice(free, min(request.controls, len(free)), replace=False)]
    controls = []
    for shift in shifts:
        moved = tuple(elsewhere(model, intervention, shift, length, draw) for intervention in request.interventions)
        controls.append((_moved(positions[0], shift, length), moved))
    return controls


def elsewhere(model: PreTrainedModel, intervention: Kind, shift: int, length: int, draw: np.random.Generator) -> Kind:
    """Return an intervention at shifted positions; a swap keeps its position and gets a random row or token."""
    if isinstance(intervention, PositionSwap):
        named = (intervention.position, intervention.source)
        rows = [row for row in range(position_limit(model) or 0) if row not in named]
        return PositionSwap(intervention.position, int(draw.choice(rows)), intervention.norm)
    if isinstance(intervention, TokenSwap):
        return TokenSwap(intervention.position, "random", int(draw.integers(2**31)))
    if isinstance(intervention, Ablate):
        return dataclasses.replace(intervention, position=_moved(intervention.position, shift, length))
    moved = tuple(_moved(position, shift, length) for position in intervention.positions)
    return dataclasses.replace(intervention, positions=moved)


def _moved(position: int, shift: int, length: int) -> int:
    # from 1 to length − 3: not the first token, and two tokens follow, one to predict from and one to predict
    return 1 + (position - 1 + shift) % (length - 3)

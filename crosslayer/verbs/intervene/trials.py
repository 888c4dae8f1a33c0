"""The options of `intervene`, its scan (the change in some layers only) and its controls (at other positions)."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator
from transformers import PreTrainedModel

from crosslayer.core.options import parse_layers
from crosslayer.output.record import Options, Seed
from crosslayer.probe.intercept import layer_stack, position_limit
from crosslayer.verbs.intervene.kinds import (
    Ablate,
    InAttention,
    Intervention,
    Kind,
    PositionSwap,
    TokenSwap,
    acting_layers,
    load_intervention,
    positions_of,
)

DEEPEST = 10_000  # more layers than any model has: the limit of layer indices before the model is loaded
BELOW, ABOVE = (0.1, 0.25, 0.5), (0.1, 0.25)  # shares of the depth where groups of a scan end and begin

Kinds = tuple[Kind, ...]


class Request(Options):
    """The options of `crosslayer.intervene`, checked before a model is loaded."""

    interventions: Kinds
    scan: str | tuple[tuple[int, ...], ...] = "auto"
    controls: int = Field(2, ge=0)
    probes: int | None = Field(None, ge=1)
    sequences: int = Field(8, ge=1)
    length: int = Field(512, ge=2)
    seed: Seed = 0

    @field_validator("interventions", mode="before")
    @classmethod
    def _load_entries(cls, interventions: Any) -> Any:
        """Build interventions from plain data."""
        if isinstance(interventions, Intervention | Mapping):
            raise ValueError("interventions must be a list such as [waiver(255)], got a single intervention")
        if not isinstance(interventions, Iterable):
            raise ValueError(f"interventions must be a list such as [waiver(255)], got {interventions!r}")
        return tuple(load_intervention(each) if isinstance(each, Mapping) else each for each in interventions)

    @field_validator("scan", mode="before")
    @classmethod
    def _read_groups(cls, scan: Any) -> Any:
        """Turn groups of any type, such as ranges, into tuples; check text for being a list of ranges."""
        if isinstance(scan, str):
            _groups(scan, DEEPEST)
            return scan
        if not isinstance(scan, Iterable):
            raise ValueError(f"`scan` must be auto, none, ranges such as '0-2,3-29' or groups of layers, got {scan!r}")
        groups = tuple(scan)
        for group in groups:
            if isinstance(group, str) or not isinstance(group, Iterable):
                raise ValueError(f"`scan` must hold groups of layers such as [[0, 1, 2], [3, 4]], got {group!r}")
        return tuple(tuple(group) for group in groups)

    @model_validator(mode="after")
    def _check_positions(self) -> "Request":
        """Raise if there are no positions, or if positions or probes exceed the sequences."""
        if not self.positions:
            raise ValueError("an intervention is missing; give at least one, such as waiver(255)")
        last = max(self.positions)
        if last >= self.length:
            raise ValueError(f"position {last} is outside the sequences, which have {self.length} tokens")
        if self.probes is not None and self.probes > self.sequences:
            raise ValueError(f"`probes` must be at most the number of sequences, {self.sequences}, got {self.probes}")
        return self

    @property
    def positions(self) -> tuple[int, ...]:
        """All positions that are changed, in the order of the interventions."""
        return tuple(position for intervention in self.interventions for position in positions_of(intervention))

    @property
    def probe_count(self) -> int:
        """The number of sequences on which scan and controls run: by default two, or one if there is only one."""
        return min(2, self.sequences) if self.probes is None else self.probes


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
    own = {layer for intervention in request.interventions for layer in acting_layers(model, intervention)}
    for layer in (layer for group in groups for layer in group):
        if not 0 <= layer < depth:
            raise ValueError(f"`scan`: layer {layer} does not exist: the model has layers 0 to {depth - 1}")
    if groups and not own and scan != "auto":
        raise ValueError("`scan` needs an intervention that acts by layer: waiver, forbid or scale_values")
    trials = {}
    for group in groups:
        acting = tuple(layer for layer in group if layer in own)
        if acting and set(acting) != own:
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
    free = []
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
        own = (intervention.position, intervention.source)
        rows = [row for row in range(position_limit(model) or 0) if row not in own]
        return PositionSwap(intervention.position, int(draw.choice(rows)), intervention.norm)
    if isinstance(intervention, TokenSwap):
        return TokenSwap(intervention.position, "random", int(draw.integers(2**31)))
    if isinstance(intervention, Ablate):
        return dataclasses.replace(intervention, position=_moved(intervention.position, shift, length))
    moved = tuple(_moved(position, shift, length) for position in intervention.positions)
    return dataclasses.replace(intervention, positions=moved)


def _moved(position: int, shift: int, length: int) -> int:
    return 1 + (position - 1 + shift) % (length - 3)

"""What is asked of an effect, and what is tried beside it: the same in some layers (a scan), elsewhere (controls)."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator
from transformers import PreTrainedModel

from crosslayer.core.plan import parse_layers
from crosslayer.output.record import Options, Seed
from crosslayer.probe.intercept import layer_stack
from crosslayer.probe.tokens import position_limit
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

DEEPEST = 10_000  # layers that no model has: what a layer's number may be before the model is known
BELOW, ABOVE = (0.1, 0.25, 0.5), (0.1, 0.25)  # of the depth: where the groups of a scan end and begin

Kinds = tuple[Kind, ...]


class Request(Options):
    """The options of `crosslayer.intervene`; see there. They are checked as a whole before a model is loaded."""

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
        """Build interventions from plain data, as a record holds it."""
        if isinstance(interventions, Intervention | Mapping):
            raise ValueError("interventions is a single intervention; give a list, such as [waiver(255)]")
        if not isinstance(interventions, Iterable):
            raise ValueError(f"interventions is {interventions!r}; give a list, such as [waiver(255)]")
        return tuple(load_intervention(each) if isinstance(each, Mapping) else each for each in interventions)

    @field_validator("scan", mode="before")
    @classmethod
    def _read_groups(cls, scan: Any) -> Any:
        """Take groups of any kind, ranges for example; refuse text that is no list of ranges."""
        if isinstance(scan, str):
            _groups(scan, DEEPEST)
            return scan
        if not isinstance(scan, Iterable):
            raise ValueError(f"scan is {scan!r}; give auto, none, ranges such as '0-2,3-29', or groups of layers")
        groups = tuple(scan)
        for group in groups:
            if isinstance(group, str) or not isinstance(group, Iterable):
                raise ValueError(f"scan holds {group!r}; give groups of layers, such as [[0, 1, 2], [3, 4]]")
        return tuple(tuple(group) for group in groups)

    @model_validator(mode="after")
    def _check_positions(self) -> "Request":
        """Refuse what does not fit into the sequences."""
        if not self.positions:
            raise ValueError("there is nothing to do; give an intervention, such as waiver(255)")
        last = max(self.positions)
        if last >= self.length:
            raise ValueError(f"position {last} is outside of the sequences of {self.length} tokens")
        if self.probes is not None and self.probes > self.sequences:
            raise ValueError(
                f"`probes` {self.probes} are more than the {self.sequences} sequences; use at most that many"
            )
        return self

    @property
    def positions(self) -> tuple[int, ...]:
        """All positions intervened on, in the order in which they are named."""
        return tuple(position for intervention in self.interventions for position in positions_of(intervention))

    @property
    def probe_count(self) -> int:
        """How many sequences scan and controls run on: two by default, if there are so many."""
        return min(2, self.sequences) if self.probes is None else self.probes


def _groups(scan: str, depth: int) -> list[list[int]]:
    """Read the groups of a scan: "auto", "none" (empty), or ranges such as "0-11,12-29", which may overlap."""
    if scan != "auto":
        return [] if scan == "none" else [parse_layers(part, depth)[0] for part in scan.split(",")]
    below, above = (sorted({max(1, round(depth * share)) for share in shares}) for shares in (BELOW, ABOVE))
    return [[*range(end)] for end in below] + [[*range(start, depth)] for start in above]


def scanned(model: PreTrainedModel, request: Request) -> dict[tuple[int, ...], Kinds]:
    """Return the interventions in each group of layers, without the groups in which nothing acts or everything does."""
    depth, scan = len(layer_stack(model)), request.scan
    groups = _groups(scan, depth) if isinstance(scan, str) else scan
    own = {layer for intervention in request.interventions for layer in acting_layers(model, intervention)}
    for layer in (layer for group in groups for layer in group):
        if not 0 <= layer < depth:
            raise ValueError(f"scan: layer {layer} does not exist; layers go from 0 to {depth - 1}")
    if groups and not own and scan != "auto":
        raise ValueError("scan: none of the interventions acts by layer, so there is nothing to scan; leave it out")
    trials = {}
    for group in groups:
        acting = tuple(layer for layer in group if layer in own)
        if acting and set(acting) != own:
            changes: list[Kind] = []  # those that act in no layer of the group are left out
            for intervention in request.interventions:
                layers = tuple(layer for layer in acting if layer in acting_layers(model, intervention))
                if not isinstance(intervention, InAttention):
                    changes.append(intervention)
                elif layers:
                    changes.append(dataclasses.replace(intervention, layers=layers))
            trials[acting] = tuple(changes)
    return trials


def shifted(model: PreTrainedModel, request: Request) -> list[tuple[int, Kinds]]:
    """Return controls: where the main position comes to lie, a token left alone so far, and the interventions there.

    All positions are shifted alike, swaps get random content. The new positions are neither the first token of the
    sequences nor the last ones.
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
    """Return an intervention at other positions; a swap at its own, with a random row or token."""
    if isinstance(intervention, PositionSwap):
        own = (intervention.position, intervention.source)
        rows = [row for row in range(position_limit(model) or 0) if row not in own]
        return PositionSwap(intervention.position, int(draw.choice(rows)))
    if isinstance(intervention, TokenSwap):
        return TokenSwap(intervention.position, "random", int(draw.integers(2**31)))
    if isinstance(intervention, Ablate):
        return dataclasses.replace(intervention, position=_moved(intervention.position, shift, length))
    moved = tuple(_moved(position, shift, length) for position in intervention.positions)
    return dataclasses.replace(intervention, positions=moved)


def _moved(position: int, shift: int, length: int) -> int:
    return 1 + (position - 1 + shift) % (length - 3)

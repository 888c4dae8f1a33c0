"""What is tried beside the interventions themselves: in some layers only (a scan), and elsewhere (controls)."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from crosslayer.probe.intercept import layer_stack
from crosslayer.probe.tokens import position_limit
from crosslayer.verbs.intervene.kinds import Ablate, ByLayer, Kind, PositionSwap, TokenSwap, layers_of, positions_of
from crosslayer.verbs.intervene.request import scan_groups

BELOW, ABOVE = (0.1, 0.25, 0.5), (0.1, 0.25)  # of the depth: where the groups of a scan end and begin


class Scanned(NamedTuple):
    """The interventions in a group of layers alone."""

    layers: tuple[int, ...]
    interventions: tuple[Kind, ...]


class Shifted(NamedTuple):
    """The interventions of a control, and where the main position comes to lie: a token that is left alone so far."""

    alone: int
    interventions: tuple[Kind, ...]

    @property
    def position(self) -> int:
        """The position that its readings are about: swaps stay where they are."""
        return positions_of(self.interventions[0])[0]


def scanned(
    model: PreTrainedModel, interventions: Sequence[Kind], scan: str | Sequence[Sequence[int]]
) -> list[Scanned]:
    """Return what to run in each group of layers, without the groups in which nothing acts or everything does.

    Raises:
        ValueError: a layer does not exist, or there are groups and no intervention acts by layer.

    """
    depth = len(layer_stack(model))
    groups = scan_groups(scan, depth) if isinstance(scan, str) else scan
    own = {layer for intervention in interventions for layer in layers_of(model, intervention)}
    for layer in (layer for group in groups or () for layer in group):
        if not 0 <= layer < depth:
            raise ValueError(f"scan: layer {layer} does not exist; layers go from 0 to {depth - 1}")
    if groups and not own:
        raise ValueError("scan: none of the interventions acts by layer, so there is nothing to scan; leave it out")
    trials = {}
    for group in _default_groups(depth) if groups is None else groups:
        acting = tuple(layer for layer in group if layer in own)
        if acting and set(acting) != own:
            trials[acting] = Scanned(acting, _within(model, interventions, acting))
    return list(trials.values())


def shifted(model: PreTrainedModel, interventions: Sequence[Kind], length: int, count: int, seed: int) -> list[Shifted]:
    """Return at most `count` controls: all positions shifted alike to tokens left alone; swaps get random content.

    Neither the first token of the sequences of `length` tokens nor the last ones are among the new positions.
    """
    draw = np.random.default_rng(seed)
    positions = [position for intervention in interventions for position in positions_of(intervention)]
    free = []
    for shift in range(1, length - 3):
        if not {_moved(position, shift, length) for position in positions} & set(positions):
            free.append(shift)
    controls = []
    shifts = [int(shift) for shift in draw.choice(free, min(count, len(free)), replace=False)]
    for shift in shifts:
        moved = tuple(elsewhere(model, intervention, shift, length, draw) for intervention in interventions)
        controls.append(Shifted(_moved(positions[0], shift, length), moved))
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


def _default_groups(depth: int) -> list[range]:
    """Return the layers below a tenth, a quarter and half of the depth, and those above a tenth and a quarter."""
    below, above = (sorted({max(1, round(depth * share)) for share in shares}) for shares in (BELOW, ABOVE))
    return [range(end) for end in below] + [range(start, depth) for start in above]


def _within(model: PreTrainedModel, interventions: Sequence[Kind], group: tuple[int, ...]) -> tuple[Kind, ...]:
    """Return the interventions in those of their layers that are in the group, without those that have none there."""
    changes: list[Kind] = []
    for intervention in interventions:
        if not isinstance(intervention, ByLayer):
            changes.append(intervention)
            continue
        own = layers_of(model, intervention)
        layers = tuple(layer for layer in group if layer in own)
        if layers:
            changes.append(dataclasses.replace(intervention, layers=layers))
    return tuple(changes)


def _moved(position: int, shift: int, length: int) -> int:
    return 1 + (position - 1 + shift) % (length - 3)

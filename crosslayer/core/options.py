"""What the options of a method may hold: layers, groups of layers, choices."""

from collections.abc import Sequence
from typing import Any

from crosslayer.core.plan import DepthPlan


def check_layers(name: str, option: str, layers: Sequence[int], count: int) -> None:
    """Refuse layers that do not exist or stand twice."""
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise ValueError(f"{name}: {option} holds {layer!r}; layers go from 0 to {count - 1}")
    if len(set(layers)) != len(layers):
        raise ValueError(f"{name}: {option} names a layer twice: {list(layers)}")


def group_sources(name: str, option: str, groups: Sequence[Sequence[int]], layers: int) -> tuple[int, ...]:
    """Return the first layer of each layer's group; the layers of a group rise, those in no group stand alone."""
    check_layers(name, option, [layer for group in groups for layer in group], layers)
    source = list(range(layers))
    for group in groups:
        if not group or list(group) != sorted(group):
            raise ValueError(f"{name}: {option} holds {list(group)}; a group is at least a layer, in rising order")
        for layer in group:
            source[layer] = group[0]
    return tuple(source)


def sharing_groups(name: str, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups as tuples; refuse groups without a second layer, in which nothing would be shared."""
    alone = [list(group) for group in groups if len(group) < 2]
    if alone or not groups:
        raise ValueError(
            f"{name}: groups {alone} have no second layer, so nothing would be shared there; write for example 18-21"
        )
    return tuple(tuple(group) for group in groups)


def check_choice(name: str, option: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is not among `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: {option} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def mixed_layers(name: str, plan: DepthPlan, state: str) -> list[int]:
    """Return the layers with a state of their own; refuse a single one, into whose state nothing could be mixed."""
    own_layers = plan.own_layers(state)
    if len(own_layers) < 2:
        raise ValueError(
            f"{name}: only layer {own_layers[0]} has {state} of its own, so nothing would be mixed; "
            "it needs two such layers"
        )
    return own_layers

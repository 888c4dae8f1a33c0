"""Checks of options: layers, groups of layers, choices, values by layer."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from crosslayer.core.plan import DepthPlan


def check_layers(name: str, option: str, layers: Sequence[int], count: int) -> None:
    """Refuse layers that do not exist or are named twice."""
    for layer in layers:
        # True is an int, and would be layer 1
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise ValueError(f"{name}: {option} must hold layers from 0 to {count - 1}, got {layer!r}")
    if len(set(layers)) != len(layers):
        raise ValueError(f"{name}: {option} must name each layer once, got {list(layers)}")


def group_sources(name: str, option: str, groups: Sequence[Sequence[int]], layers: int) -> tuple[int, ...]:
    """Return, for each layer, the first layer of its group, or the layer itself if it is in no group."""
    check_layers(name, option, [layer for group in groups for layer in group], layers)
    source = list(range(layers))
    for group in groups:
        if not group or list(group) != sorted(group):
            raise ValueError(f"{name}: {option} must hold groups of layers in rising order, got {list(group)}")
        for layer in group:
            source[layer] = group[0]
    return tuple(source)


def sharing_groups(name: str, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups as tuples; refuse groups of a single layer, which would share nothing."""
    alone = [list(group) for group in groups if len(group) < 2]
    if alone or not groups:
        raise ValueError(f"{name}: each group must have at least two layers, got {alone}; for example 18-21")
    return tuple(tuple(group) for group in groups)


def parse_layers(text: str, layers: int) -> list[list[int]]:
    """Parse groups of 0-based layers, such as "18-21,22-25" or "18+20,19+21".

    Commas separate groups; within a group a dash is a range and a plus joins layers.

    Raises:
        ValueError: the text is not such a list, or names a layer that does not exist or twice.
    """
    groups: list[list[int]] = []
    for group in text.split(","):
        groups.append([])
        for item in group.split("+"):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)
            if match is None:
                raise ValueError(
                    f"layers {text!r}: {item!r} is neither a layer nor a range; write, for example, 18-21,22-25"
                )
            first = int(match[1])
            last = first if match[2] is None else int(match[2])
            if not first <= last < layers:
                raise ValueError(f"layers {text!r}: {item!r} is out of range; layers go from 0 to {layers - 1}")
            groups[-1].extend(range(first, last + 1))
    named = [layer for group in groups for layer in group]
    if len(set(named)) != len(named):
        raise ValueError(f"layers {text!r}: a layer is named twice; name each once")
    return groups


def check_choice(name: str, option: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is not among `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: {option} must be one of {', '.join(map(repr, choices))}, got {value!r}")


# every layer of a model asks for the same
@lru_cache(8)
def mixed_layers(name: str, plan: DepthPlan, state: str) -> tuple[int, ...]:
    """Return the layers that compute this state themselves; refuse fewer than two, since there is nothing to mix."""
    own_layers = plan.own_layers(state)
    if len(own_layers) < 2:
        raise ValueError(f"{name} needs at least two layers with their own {state}, got only layer {own_layers[0]}")
    return tuple(own_layers)


# a range is written out layer by layer: a mistyped number must not fill the memory
MOST_LAYERS = 10_000
Value = TypeVar("Value")
BY_LAYER = re.compile(r"\s*(?P<value>[^@,\s]+)\s*(?:@(?P<first>\d+)(?:-(?P<last>\d+))?)?\s*", re.ASCII)


@dataclass(frozen=True)
class ByLayer(Generic[Value]):
    """A value of all layers, `everywhere`, or values of the first ones, `layers`; `text` is this as it was written."""

    text: str
    everywhere: Value | None = None
    layers: tuple[Value | None, ...] = ()

    def at(self, layer: int) -> Value | None:
        """Return the value of a layer, None if it has none."""
        if self.everywhere is not None:
            return self.everywhere
        return self.layers[layer] if layer < len(self.layers) else None

    def check_count(self, count: int, what: str) -> None:
        """Refuse layers that do not exist; the message begins with `what`."""
        if len(self.layers) > count:
            raise ValueError(f"{what}: layer {len(self.layers) - 1} does not exist; the last is {count - 1}")


def by_layer(
    text: str, what: str, example: str, read: Callable[[str], Value]
) -> tuple[Value | None, tuple[Value | None, ...]]:
    """Return the value of all layers, or the values of the first layers, that a text such as `8@0-11,4@12-29` gives.

    Raises:
        ValueError: the text cannot be read, or names a layer twice; the message begins with `what`.
    """
    pieces, values = text.split(","), dict[int, Value]()
    for piece in pieces:
        match = BY_LAYER.fullmatch(piece)
        if match is None:
            raise ValueError(f"{what} cannot be parsed at {piece!r}; write it {example}")
        if match["first"] is None:
            if len(pieces) > 1:
                raise ValueError(f"{what}: if there are several amounts, each needs layers, {example}")
            return read(match["value"]), ()
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if not first <= last < MOST_LAYERS:
            raise ValueError(f"{what}: {first}-{last} is not a range of layers")
        for layer in range(first, last + 1):
            if layer in values:
                raise ValueError(f"{what} names layer {layer} twice")
            values[layer] = read(match["value"])
    return None, tuple(values.get(layer) for layer in range(max(values) + 1))

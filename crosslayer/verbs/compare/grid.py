"""The runs of a comparison: settings × arms × seeds, each a recipe that was checked before the first one starts."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from crosslayer.verbs.compare.arms import label_of, read_methods
from crosslayer.verbs.compare.read import setting_of
from crosslayer.verbs.compare.record import Setting
from crosslayer.verbs.train.recipe import Recipe, load_recipe
from crosslayer.verbs.train.recipe_file import parse_value

LONGEST = 60  # characters of a part of a folder's name
OWN = {"model.method": "methods", "seed": "seeds", "name": "out"}  # keys that are not varied → the option to use
SCHEDULE = "schedule."


@dataclass(frozen=True)
class Cell:
    """A run to be: its place among the others, its recipe, and its folder's name."""

    setting: Setting
    arm: str
    seed: int
    recipe: Recipe
    name: str

    @property
    def key(self) -> str:
        """What runs of the same arm and setting have in common, whatever their seed."""
        return " · ".join(filter(None, (self.setting.label, self.arm)))


@dataclass(frozen=True)
class Grid:
    """What is trained: a recipe's file with settings on top, arms, the number of seeds, and what varies.

    Raises:
        ValueError: on construction or when it is laid out, whatever is wrong, before anything is trained.

    """

    path: Path
    settings: tuple[str, ...]
    arms: tuple[list[dict[str, Any]], ...]
    seeds: int
    varied: tuple[tuple[str, list[Any]], ...]

    def cells(self, steps: dict[str, int] | None = None) -> list[Cell]:
        """Return the runs, seed by seed, so that pairs are complete early.

        Args:
            steps: of every `Cell.key`, where a budget decides them.

        """
        first = load_recipe(self.path, self.settings).seed
        settings, arms = self._settings(), [label_of(arm) for arm in self.arms]
        rooms = [f"{name}-" if name else "" for name in _folders([setting.label for setting in settings])]
        names = _folders(arms)
        return [
            self._cell(settings[place], number, seed, f"{rooms[place]}{names[number]}-{seed}", steps)
            for seed in range(first, first + self.seeds)
            for place in range(len(settings))
            for number in range(len(arms))
        ]

    def _settings(self) -> list[Setting]:
        keys = [key for key, _ in self.varied]
        return [setting_of(dict(zip(keys, values, strict=True))) for values in product(*(v for _, v in self.varied))]

    def _cell(self, setting: Setting, number: int, seed: int, name: str, steps: dict[str, int] | None) -> Cell:
        own = [f"seed={seed}", f"name={name}"]
        cell = Cell(setting, label_of(self.arms[number]), seed, self.recipe(setting, number, own), name)
        if steps is None:
            return cell
        schedule = [f"{SCHEDULE}steps={steps[cell.key]}", f"{SCHEDULE}tokens=null"]
        return replace(cell, recipe=self.recipe(setting, number, [*own, *schedule]))

    def recipe(self, setting: Setting, number: int, more: Sequence[str] = ()) -> Recipe:
        """Return the recipe of an arm in a setting, with more settings on top.

        Raises:
            ValueError: it cannot be trained; the line says of which arm.

        """
        values = [f"{key}={json.dumps(value)}" for key, value in setting.values.items()]
        method = json.dumps(self.arms[number] or None)
        try:
            return load_recipe(self.path, [*self.settings, *values, f"model.method={method}", *more])
        except ValueError as error:
            place = f" with {setting.label}" if setting.label else ""
            raise ValueError(f"{label_of(self.arms[number])}{place}: {error}") from None


def read_grid(
    path: str | Path, methods: str | Sequence[Any], seeds: int, vary: Sequence[str], settings: Sequence[str]
) -> Grid:
    """Return what is to be trained.

    Args:
        path: of a recipe.
        methods: as `read_methods` takes them.
        seeds: how many, from the recipe's own on.
        vary: "key=value,value" each; settings are all their combinations.
        settings: "key=value" for all runs.

    Raises:
        ValueError: something of it is wrong.

    """
    if seeds < 1:
        raise ValueError(f"`seeds` is {seeds}; it must be at least 1")
    varied = tuple(map(_varied, vary))
    keys = [key for key, _ in varied]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"`vary` names {next(key for key in keys if keys.count(key) > 1)} twice; write its values once"
        )
    return Grid(Path(path), tuple(settings), tuple(read_methods(methods)), seeds, varied)


def _varied(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ValueError(f"`vary` is {text!r}; write key=value,value, for example model.size=tiny,mini")
    key = key.strip()
    for own, option in OWN.items():
        if key == own:
            raise ValueError(f"`vary` is {text!r}; the runs differ in {key} by themselves: use `{option}`")
    return key, list(_unique(parse_value(f"[{values}]", f"vary {text!r}"), text))


def _unique(values: list[Any], text: str) -> Iterator[Any]:
    seen = []
    for value in values:
        if value in seen:
            raise ValueError(f"`vary` is {text!r}, which holds {value!r} twice")
        seen.append(value)
        yield value


def _folders(labels: Sequence[str]) -> list[str]:
    """Return parts of folders' names, of which no two are the same; of an empty label nothing."""
    names: list[str] = []
    for label in labels:
        plain = re.sub(r"model\.|data\.|schedule\.|train\.", "", label)
        short = re.sub(r"[^A-Za-z0-9_.]+", "-", plain).strip("-.")[:LONGEST]
        name = short if short not in names else f"{short}-{len(names)}"
        names.append(name)
    return names

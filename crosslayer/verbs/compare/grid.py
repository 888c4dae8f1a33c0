"""The runs of a comparison: settings × variants × seeds, each a recipe that was checked before the first one starts.

A variant is called "vanilla" without methods; a method by its name and options other than default, "name(option=2)";
several are joined by "+".
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Self

from crosslayer.core.methods import load_methods, method_class, to_entry
from crosslayer.verbs.compare.record import Budget, Setting
from crosslayer.verbs.train.recipe import Recipe, load_recipe
from crosslayer.verbs.train.recipe_file import nearest, parse_value

LONGEST = 60  # characters of a part of a folder's name
OWN = {"model.method": "methods", "seed": "seeds", "name": "out"}  # keys that are not varied → the option to use
PLAIN = "vanilla"
NAME = re.compile(r"[A-Za-z_][\w.]{0,99}", re.ASCII)
STEPS, TOKENS = "schedule.steps", "schedule.tokens"  # what a budget decides
Methods = list[dict[str, Any]]  # of a variant, as a config holds them


def read_methods(methods: str | Sequence[Any]) -> list[Methods]:
    """Return the methods of each variant as a config holds them.

    They are a YAML flow list without its brackets, "vanilla, NAME, {name: NAME, option: 2}", or its entries; an entry
    may itself be a list of methods, which act together. "vanilla" and null are none.
    """
    entries = parse_value(f"[{methods}]", f"methods {methods!r}") if isinstance(methods, str) else methods
    if not entries:
        raise ValueError("`methods` is empty; write for example vanilla and a method's name, with a comma between")
    variants: dict[str, Methods] = {}
    for entry in entries:
        variant = _variant(entry)
        if label_of(variant) in variants:
            raise ValueError(f"`methods` names {label_of(variant)} twice")
        variants[label_of(variant)] = variant
    return [*variants.values()]


def _variant(entry: Any) -> Methods:
    if entry is None or entry in (PLAIN, {"name": PLAIN}):
        return []
    if not isinstance(entry, str | dict | list):
        raise ValueError(
            f"`methods` holds {entry!r}; write a method's name, {{name: …, option: …}}, or a list of these"
        )
    try:
        return json.loads(json.dumps([to_entry(method) for method in load_methods(entry)]))  # tuples are lists there
    except (ValueError, TypeError) as error:  # the latter of an option that JSON cannot hold
        raise ValueError(f"`methods`: {error}; {PLAIN} is none") from None


def label_of(methods: Methods) -> str:
    """Return what a variant is called, in plain characters."""
    return "+".join(map(_method_label, methods)) or PLAIN


def _method_label(entry: dict[str, Any]) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"a method is called {name!r}, which is no name")
    try:
        chosen: Any = method_class(name)
        defaults = {field.name: json.loads(json.dumps(field.default, default=repr)) for field in fields(chosen)}
    except ValueError:  # a module of somebody's own, which is not imported here
        defaults = {}
    changed = {key: value for key, value in entry.items() if key != "name" and value != defaults.get(key, ...)}
    words = [f"{key}={json.dumps(value)}".replace('"', "") for key, value in changed.items()]
    return f"{name}({', '.join(words)})" if words else name


def pick_baseline(labels: Sequence[str], baseline: str | None) -> str:
    """Return the variant that the others are compared with: by default the plain one, or the first."""
    if baseline is None:
        baseline = PLAIN if PLAIN in labels else labels[0]
    if baseline not in labels:
        raise ValueError(f"`baseline` is {baseline!r}, which is no variant; {nearest(baseline, list(labels))}")
    if len(labels) < 2:
        raise ValueError(f"there is nothing beside {baseline}; a comparison needs two methods")
    return baseline


@dataclass(frozen=True)
class Cell:
    """A run to be: its place among the others, and its recipe, whose name is its folder's."""

    setting: Setting
    methods: Methods
    recipe: Recipe

    @property
    def key(self) -> str:
        """What runs of the same variant and setting have in common, whatever their seed."""
        return _key(self.setting, self.methods)


@dataclass(frozen=True)
class Grid:
    """What is trained: a recipe's file with settings on top, variants, the number of seeds, and what varies."""

    path: Path
    settings: tuple[str, ...]
    variants: tuple[Methods, ...]
    seeds: int
    varied: dict[str, list[Any]]

    def within(self, budget: Budget | None) -> Self:
        """Return the grid under a budget; one of tokens is set in the recipe of all runs."""
        if budget is None:
            return self
        for key in (STEPS, TOKENS):
            if key in self.varied:
                raise ValueError(f"`budget` decides {key}; leave one of the two out")
        if budget.kind != "tokens":
            return self
        return replace(self, settings=(*self.settings, f"{STEPS}=null", f"{TOKENS}={round(budget.amount)}"))

    def cells(self, steps: dict[str, int] | None = None) -> list[Cell]:
        """Return the runs, seed by seed, so that pairs are complete early; a budget decides `steps` by `Cell.key`."""
        first = load_recipe(self.path, self.settings).seed
        settings = [
            Setting.of(dict(zip(self.varied, values, strict=True))) for values in product(*self.varied.values())
        ]
        rooms = [f"{name}-" if name else "" for name in _folders([setting.label for setting in settings])]
        variants = _folders([label_of(methods) for methods in self.variants])
        cells = []
        for seed in range(first, first + self.seeds):
            for setting, room in zip(settings, rooms, strict=True):
                for methods, variant in zip(self.variants, variants, strict=True):
                    own = [f"seed={seed}", f"name={room}{variant}-{seed}"]
                    if steps is not None:
                        own += [f"{STEPS}={steps[_key(setting, methods)]}", f"{TOKENS}=null"]
                    cells.append(Cell(setting, methods, self.recipe(setting, methods, own)))
        return cells

    def recipe(self, setting: Setting, methods: Methods, more: Sequence[str] = ()) -> Recipe:
        """Return the recipe of a variant in a setting, with more settings on top."""
        values = [f"{key}={json.dumps(value)}" for key, value in setting.values.items()]
        method = json.dumps(methods or None)
        try:
            return load_recipe(self.path, [*self.settings, *values, f"model.method={method}", *more])
        except ValueError as error:
            place = f" with {setting.label}" if setting.label else ""
            raise ValueError(f"{label_of(methods)}{place}: {error}") from None


def read_grid(
    path: str | Path, methods: str | Sequence[Any], seeds: int, vary: Sequence[str], settings: Sequence[str]
) -> Grid:
    """Return what is to be trained by the recipe of a path, with so many seeds from its own on.

    `vary` holds "key=value,value", and settings to compare in are all combinations; `settings` are "key=value" for all.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` is {seeds}; it must be at least 1")
    varied: dict[str, list[Any]] = {}
    for text in vary:
        key, _, values = (part.strip() for part in text.partition("="))
        if not key or not values:
            raise ValueError(f"`vary` is {text!r}; write key=value,value, for example model.size=tiny,mini")
        if key in OWN:
            raise ValueError(f"`vary` is {text!r}; the runs differ in {key} by themselves: use `{OWN[key]}`")
        if key in varied:
            raise ValueError(f"`vary` names {key} twice; write its values once")
        varied[key] = parse_value(f"[{values}]", f"vary {text!r}")
        for number, value in enumerate(varied[key]):
            if value in varied[key][:number]:
                raise ValueError(f"`vary` is {text!r}, which holds {value!r} twice")
    return Grid(Path(path), tuple(settings), tuple(read_methods(methods)), seeds, varied)


def _key(setting: Setting, methods: Methods) -> str:
    return " · ".join(filter(None, (setting.label, label_of(methods))))


def _folders(labels: Sequence[str]) -> list[str]:
    """Return parts of folders' names, of which no two are the same; of an empty label nothing."""
    names: list[str] = []
    for label in labels:
        plain = re.sub(r"model\.|data\.|schedule\.|train\.", "", label)
        short = re.sub(r"[^A-Za-z0-9_.]+", "-", plain).strip("-.")[:LONGEST]
        names.append(short if short not in names else f"{short}-{len(names)}")
    return names

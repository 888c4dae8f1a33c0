"""The runs of a comparison: configurations × variants × seeds, with every recipe checked before the first run starts.

A variant without methods is called "vanilla"; otherwise a method is named with its non-default options,
"name(option=2)", and several are joined by "+". Grouped-query and multi-query attention are variants too:
"NAME+num_key_value_heads=1".

`grid.json` in the folder of a comparison holds the runs that diverged.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from crosslayer.core.methods import load_methods, method_class, to_entry
from crosslayer.output.record import Frozen
from crosslayer.training.recipe import Recipe, given_recipe, load_recipe
from crosslayer.training.recipe_file import nearest, parse_value
from crosslayer.verbs.compare.result import Configuration, Variant

LONGEST = 60  # characters of a component of a folder's name
HEADS = "num_key_value_heads"  # the key of a model's shape that belongs to its variant
RATE = "learning_rate"  # the key of `train` that may
FIXED = {  # keys that --vary refuses → the option to use
    "model.method": "methods",
    f"model.shape.{HEADS}": "methods",
    "seed": "seeds",
    "name": "out",
}
PLAIN = "vanilla"
NAME = re.compile(r"[A-Za-z_][\w.]{0,99}", re.ASCII)
Methods = list[dict[str, Any]]  # of a variant, as in a config
STATE = "grid.json"


def read_methods(methods: str | Sequence[Any], heads: int | None = None) -> list[Variant]:
    """Return the variants to train.

    `methods` is a YAML flow list without its brackets, "vanilla, NAME, {name: NAME, option: 2}", or a list of these
    entries. An entry that is a list combines several methods; "vanilla" and null mean no method. An entry may hold
    {num_key_value_heads: 1} and {learning_rate: 1e-3}, alone or with methods; by default a variant has the recipe's
    own values.
    """
    # YAML reads them, since options of a method may hold lists and mappings with commas.
    entries = parse_value(f"[{methods}]", f"methods {methods!r}") if isinstance(methods, str) else methods
    if not entries:
        raise ValueError("`methods` must name at least two variants, got none; for example vanilla, NAME")
    variants: dict[str, Variant] = {}
    for entry in entries:
        variant = _variant(entry, heads)
        if variant.label in variants:
            raise ValueError(f"`methods` names {variant.label} twice")
        variants[variant.label] = variant
    return [*variants.values()]


def _variant(entry: Any, heads: int | None) -> Variant:
    if not isinstance(entry, str | dict | list | None):
        raise ValueError(
            f"`methods` must hold method names, {{name: NAME, option: VALUE}} or lists of these, got {entry!r}"
        )
    methods: list[Any] = []
    rate = None
    for part in entry if isinstance(entry, list) else [entry]:
        values = part if isinstance(part, dict) else {}
        if values.keys() == {HEADS}:
            heads = values[HEADS]
            if type(heads) is not int or heads < 1:
                raise ValueError(f"`methods`: {HEADS} must be a whole number above 0, got {heads!r}")
        elif values.keys() == {RATE}:
            rate = values[RATE]
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1:
                raise ValueError(f"`methods`: {RATE} must be a number above 0 and below 1, got {rate!r}")
        else:
            methods.append(part)
    if methods in ([None], [PLAIN], [{"name": PLAIN}]):
        methods = []
    try:
        plain = json.dumps([to_entry(method) for method in load_methods(methods)])
        variant = variant_of(json.loads(plain), heads)  # JSON turns tuples into lists
        return variant.model_copy(update={"learning_rate": rate})
    except (ValueError, TypeError) as error:  # TypeError: an option that JSON cannot hold
        raise ValueError(f"`methods`: {error}; {PLAIN} means no method") from None


def variant_of(methods: Methods, heads: int | None = None) -> Variant:
    """Return the variant of methods, and of a number of key/value heads if its recipe states one."""
    parts = []
    for entry in methods:
        # The name may come from an untrusted record, and becomes part of pages and names of folders.
        name = entry.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"a method's name must be letters, digits, _ and ., got {name!r}")
        try:
            chosen: Any = method_class(name)
            defaults = {field.name: json.loads(json.dumps(field.default, default=repr)) for field in fields(chosen)}
        except ValueError:  # a user-defined method, which is not imported here
            defaults = {}
        changed = {key: value for key, value in entry.items() if key != "name" and value != defaults.get(key, ...)}
        options = [f"{key}={json.dumps(value)}".replace('"', "") for key, value in changed.items()]
        parts.append(f"{name}({', '.join(options)})" if options else name)
    if heads is not None:
        parts.append(f"{HEADS}={heads}")
    return Variant(label="+".join(parts) or PLAIN, methods=methods, num_key_value_heads=heads)


def pick_baseline(labels: Sequence[str], baseline: str | None) -> str:
    """Return the baseline: by default the variant without methods, or else the first."""
    if baseline is None:
        baseline = PLAIN if PLAIN in labels else labels[0]
    if baseline not in labels:
        raise ValueError(f"`baseline` must be one of the variants, got {baseline!r}; {nearest(baseline, list(labels))}")
    if len(labels) < 2:
        raise ValueError(f"a comparison needs at least two variants, got only {baseline}")
    return baseline


@dataclass(frozen=True)
class PlannedRun:
    """A run to be trained: its configuration, and its recipe, whose name is the run's folder."""

    configuration: Configuration
    recipe: Recipe


@dataclass(frozen=True)
class Grid:
    """What is trained: a recipe file with overrides, the variants, the number of seeds, and the varied keys."""

    path: Path
    overrides: tuple[str, ...]
    variants: tuple[Variant, ...]
    seeds: int
    varied: dict[str, list[Any]]

    def planned_runs(self) -> list[PlannedRun]:
        """Return the runs, seed by seed so that pairs are complete early.

        Raises:
            ValueError: a recipe is wrong; the message names its variant and configuration.
        """
        first = load_recipe(self.path, self.overrides).seed
        configurations = [
            Configuration.from_values(dict(zip(self.varied, values, strict=True)))
            for values in product(*self.varied.values())
        ]
        prefixes = [
            f"{name}-" if name else "" for name in _folders([configuration.label for configuration in configurations])
        ]
        names = _folders([variant.label for variant in self.variants])
        planned = []
        for seed in range(first, first + self.seeds):
            for configuration, prefix in zip(configurations, prefixes, strict=True):
                for variant, name in zip(self.variants, names, strict=True):
                    # Later overrides win: a variant's own values over the configuration's, over those of all runs.
                    values = [f"{key}={json.dumps(value)}" for key, value in configuration.values.items()]
                    values.append(f"model.method={json.dumps(variant.methods or None)}")
                    if variant.num_key_value_heads is not None:
                        values.append(f"model.shape.{HEADS}={variant.num_key_value_heads}")
                    if variant.learning_rate is not None:
                        values.append(f"train.{RATE}={variant.learning_rate}")
                    values += [f"seed={seed}", f"name={prefix}{name}-{seed}"]
                    try:
                        recipe = load_recipe(self.path, [*self.overrides, *values])
                    except ValueError as error:
                        varied = f" with {configuration.label}" if configuration.label else ""
                        raise ValueError(f"{variant.label}{varied}: {error}") from None
                    planned.append(PlannedRun(configuration, recipe))
        return planned


def read_grid(
    path: str | Path, methods: str | Sequence[Any], seeds: int, vary: Sequence[str], overrides: Sequence[str]
) -> Grid:
    """Return the grid of a recipe file: `seeds` seeds, counted from the recipe's own.

    Each text in `vary` is "key=value,value", and every combination of values is a configuration. Each text in
    `overrides` is "key=value", for all runs.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1, got {seeds}")
    varied: dict[str, list[Any]] = {}
    for text in vary:
        key, _, values = (each.strip() for each in text.partition("="))
        if not key or not values:
            raise ValueError(f"`vary` must be key=value,value, got {text!r}; for example model.size=tiny,mini")
        if key in FIXED:
            raise ValueError(f"`vary` must not name {key}, got {text!r}; use `{FIXED[key]}` instead")
        if key in varied:
            raise ValueError(f"`vary` must name each key once, got {key} twice")
        varied[key] = parse_value(f"[{values}]", f"vary {text!r}")
        for index, value in enumerate(varied[key]):
            if value in varied[key][:index]:
                raise ValueError(f"`vary` must name each value once, got {value!r} twice in {text!r}")
    model = given_recipe(path, overrides, stages=False).model
    assert model is not None
    return Grid(Path(path), tuple(overrides), tuple(read_methods(methods, model.shape.get(HEADS))), seeds, varied)


def _folders(labels: Sequence[str]) -> list[str]:
    """Return a folder name for each label, all different; an empty name for an empty label."""
    names: list[str] = []
    for label in labels:
        plain = re.sub(r"model\.|data\.|schedule\.|train\.", "", label)
        short = re.sub(r"[^A-Za-z0-9_.]+", "-", plain).strip("-.")[:LONGEST]
        # Labels that differ only in punctuation, or after the cut, would share a folder.
        names.append(short if short not in names else f"{short}-{len(names)}")
    return names


class Stopped(Frozen):
    """A run that diverged: the message, and the SHA-256 of its recipe, so that a changed recipe is trained again."""

    what: str
    recipe: str


class State(Frozen):
    """What `grid.json` holds, so that runs can be resumed."""

    schema_: Literal["crosslayer/grid/3"] = Field(
        "crosslayer/grid/3", validation_alias="schema", serialization_alias="schema"
    )
    stopped: dict[str, Stopped] = Field({}, description="runs that diverged, by name")

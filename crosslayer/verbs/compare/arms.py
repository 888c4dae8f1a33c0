"""Arms of a comparison: methods and what they are called.

`[]` is "vanilla"; a method is its name and what is not its default, "name(option=2)"; several are joined by "+".
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from crosslayer.core.methods import load_methods, method_class, to_entry
from crosslayer.verbs.train.recipe_file import nearest, parse_value

PLAIN = "vanilla"
NAME = re.compile(r"[A-Za-z_][\w.]{0,99}", re.ASCII)


Methods = list[dict[str, Any]]  # of an arm, as a config holds them


def read_methods(methods: str | Sequence[Any]) -> list[Methods]:
    """Return the methods of each arm as a config holds them.

    Args:
        methods: a YAML flow list without its brackets, "vanilla, NAME, {name: NAME, option: 2}", or its entries; an
            entry may itself be a list of methods, which act together. "vanilla" and null are none.

    """
    entries = parse_value(f"[{methods}]", f"methods {methods!r}") if isinstance(methods, str) else methods
    if not entries:
        raise ValueError("`methods` is empty; write for example vanilla and a method's name, with a comma between")
    arms: dict[str, Methods] = {}
    for entry in entries:
        arm = _arm(entry)
        if label_of(arm) in arms:
            raise ValueError(f"`methods` names {label_of(arm)} twice")
        arms[label_of(arm)] = arm
    return [*arms.values()]


def _arm(entry: Any) -> Methods:
    if entry is None or entry in (PLAIN, {"name": PLAIN}):
        return []
    if not isinstance(entry, str | dict | list):
        raise ValueError(
            f"`methods` holds {entry!r}; write a method's name, {{name: …, option: …}}, or a list of these"
        )
    try:
        return _plain([to_entry(method) for method in load_methods(entry)])
    except ValueError as error:
        raise ValueError(f"`methods`: {error}; {PLAIN} is none") from None


def label_of(methods: Methods) -> str:
    """Return what an arm is called, in plain characters."""
    return "+".join(map(_method_label, methods)) or PLAIN


def _method_label(entry: dict[str, Any]) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"a method is called {name!r}, which is no name")
    try:
        defaults = {field.name: field.default for field in dataclasses.fields(method_class(name))}  # type: ignore[arg-type]
    except ValueError:  # a module of somebody's own, which is not imported here
        defaults = {}
    options = {key: _plain(value) for key, value in entry.items() if key != "name"}
    changed = {key: value for key, value in options.items() if value != _plain(defaults.get(key, ...))}
    words = [f"{key}={json.dumps(value)}".replace('"', "") for key, value in changed.items()]
    return f"{name}({', '.join(words)})" if words else name


def _plain(value: Any) -> Any:
    """Return options as a record has them: tuples are lists."""
    return json.loads(json.dumps(value, default=repr))


def pick_baseline(labels: Sequence[str], baseline: str | None) -> str:
    """Return the arm that the others are compared with: by default the plain one, or the first."""
    if baseline is None:
        baseline = PLAIN if PLAIN in labels else labels[0]
    if baseline not in labels:
        raise ValueError(f"`baseline` is {baseline!r}, which is no arm; {nearest(baseline, list(labels))}")
    if len(labels) < 2:
        raise ValueError(f"there is nothing beside {baseline}; a comparison needs two methods")
    return baseline

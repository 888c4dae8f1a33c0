"""Reads the files of a recipe: YAML without surprises, files that extend one another, and settings on top.

A file may come from anyone. It is read as YAML's core schema: text, whole numbers, numbers (3e-4 is one), true, false
and null; `yes`, dates and octal digits are text. Tags, aliases and keys that stand twice are refused.
"""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

LARGEST = 2**16  # bytes of a file
SETTING = "--set"  # how errors call what is no file
WHOLE = (("model", "method"),)  # mappings that another replaces, never extends: options belong to a method's name
Keys = tuple[str | int, ...]  # the place of a value: ("data", "domains", 0, "weight")


@dataclasses.dataclass(frozen=True)
class Draft:
    """The values of a recipe before they are checked, and who wrote them."""

    values: dict[str, Any]
    origins: dict[Keys, str]

    def origin(self, keys: Keys) -> str:
        """Return the file that wrote the value in a place, or the innermost one around it; `SETTING` for a setting."""
        while keys not in self.origins:
            keys = keys[:-1]
        return self.origins[keys]


def dotted(keys: Keys) -> str:
    """Return a place as users write it: data.domains.0.weight."""
    words = map(str, keys)
    return ".".join(word if word.isprintable() else repr(word) for word in words)


def nearest(name: str, names: Sequence[str]) -> str:
    """Return what is said to a name that is not among `names`."""
    close = [other for other in names if name and other.startswith(name)] or difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"


def read_draft(path: Path, settings: Sequence[str] = ()) -> Draft:
    """Read a recipe's file and those that it extends, and apply settings such as "train.learning_rate=3e-4".

    Mappings merge key by key, the extending file wins; lists, numbers, text and methods are replaced. A name is not
    inherited.

    Raises:
        ValueError: a file is missing or no YAML, files extend one another in a circle, or a setting has no place; one
            line names the file and the line or key.

    """
    draft = _read(path, ())
    for setting in settings:
        _apply(draft, " ".join(setting.split()))
    return draft


def _read(path: Path, above: tuple[Path, ...]) -> Draft:
    """Read a file; `above` are those that lead to it."""
    values = _mapping(path)
    base = values.pop("extends", None)
    if base is None:
        draft = Draft({}, {(): str(path)})
    elif not isinstance(base, str):
        raise ValueError(f"{path}: extends is {base!r}; it must be the name of a file beside this one")
    else:
        below = Path(os.path.normpath(path.parent / base))
        readers = (*above, path)
        if below.resolve() in [reader.resolve() for reader in readers]:
            raise ValueError(f"{path}: extends goes in a circle: {' → '.join(p.name for p in (*readers, below))}")
        if not below.is_file():
            raise ValueError(f"{path}: extends is {base!r}, which is no file; {_nearest_file(below, path)}")
        draft = _read(below, readers)
        draft.values.pop("name", None)
        draft.origins[()] = str(path)  # whose place is named where nobody wrote a value
    _merge(draft, draft.values, values, (), str(path))
    return draft


def _merge(draft: Draft, under: dict[str, Any], over: dict[str, Any], place: Keys, origin: str) -> None:
    """Write the keys of `over` into `under`, which stands at `place` of the draft."""
    for key, value in over.items():
        keys = (*place, key)
        extended = under.get(key)
        if isinstance(value, dict) and isinstance(extended, dict) and keys not in WHOLE:
            _merge(draft, extended, value, keys, origin)
        else:
            under[key] = value
            _claim(draft, keys, origin)


def _claim(draft: Draft, keys: Keys, origin: str) -> None:
    """Note who wrote a value, in the place of who wrote any part of it before."""
    for other in [other for other in draft.origins if other[: len(keys)] == keys]:
        del draft.origins[other]
    draft.origins[keys] = origin


def _apply(draft: Draft, setting: str) -> None:
    """Write a setting into the draft, whose mappings it may extend by new keys."""
    name, equals, text = setting.partition("=")
    words = name.strip().split(".")
    if not equals or not all(words):
        raise ValueError(f"{SETTING} {setting}: it must be key=value, for example train.learning_rate=3e-4")
    value = parse_value(text, f"{SETTING} {setting}")
    parent: Any = draft.values
    keys: Keys = ()
    for word in words[:-1]:
        step = _step(parent, keys, word, setting)
        if isinstance(parent, dict) and parent.get(word) is None:
            parent[word] = {}
            _claim(draft, (*keys, word), SETTING)
        parent, keys = parent[step], (*keys, step)
    last = _step(parent, keys, words[-1], setting)
    parent[last] = value
    _claim(draft, (*keys, last), SETTING)


def _step(parent: Any, keys: Keys, word: str, setting: str) -> str | int:
    """Return the key, or the number in a list, that a word of a setting means."""
    if isinstance(parent, dict):
        return word
    if not isinstance(parent, list):
        raise ValueError(f"{SETTING} {setting}: {dotted(keys)} is {parent!r}, which has no key {word!r}")
    if not word.isdecimal() or int(word) >= len(parent):
        raise ValueError(
            f"{SETTING} {setting}: {dotted(keys)} is a list; its entries are 0 to {len(parent) - 1}, not {word!r}"
        )
    return int(word)


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"recipe {str(path)!r} {kind}; {_nearest_file(path)}")
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{path}: it has {size:,} bytes, and a recipe at most {LARGEST:,}")
    try:
        values = parse_value(path.read_bytes().decode("utf-8"), str(path))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is not UTF-8 text") from None
    if not isinstance(values, dict):
        kind = "is empty" if values is None else f"holds {type(values).__name__}"
        raise ValueError(f"{path}: it {kind}; a recipe holds keys and values, such as schedule: {{steps: 100}}")
    return values


def _nearest_file(path: Path, *others: Path) -> str:
    """Return what is said to a file that is not there; `others` are not meant."""
    names = sorted(str(other) for other in path.parent.glob("[!.]*.y*ml") if other not in others)
    return nearest(str(path), names) if names else "it must be a YAML file"


def parse_value(text: str, place: str) -> Any:
    """Return the value of YAML text."""
    try:
        return yaml.load(text, _Core)  # noqa: S506  a loader that builds nothing but plain data
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text else ""
        raise ValueError(f"{place}{line}: {' '.join(str(error.problem or error.context).split())}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{place}: it is no YAML text: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ValueError(f"{place}: it is nested too deeply") from None


class _Core(yaml.SafeLoader):
    """Builds text, numbers, truth values, null, lists and mappings, and refuses everything else."""

    yaml_implicit_resolvers = {}
    yaml_constructors = {}

    def compose_node(self, parent, index):
        """Refuse aliases, few lines of which may stand for terabytes or for themselves, and tags."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _fault(event, f"*{event.anchor} is an alias; write the value out, or use extends")
        if event.tag is not None:
            raise _fault(event, f"the tag {event.tag} is not read; leave it out")
        return super().compose_node(parent, index)

    def mapping(self, node: yaml.Node) -> dict[str, Any]:
        """Build a mapping, whose keys are words and stand once."""
        assert isinstance(node, yaml.MappingNode)
        values = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _fault(key_node, f"the key {key!r} is not a word")
            if key in values:
                raise _fault(key_node, f"the key {key!r} stands twice")
            values[key] = self.construct_object(value_node, deep=True)
        return values

    def text(self, node: yaml.Node) -> str:
        """Build text, which any record can hold."""
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise _fault(node, "text holds half of a character (a surrogate)")
        return node.value

    def number(self, node: yaml.Node) -> int | float:
        """Build a number; a whole one written with an exponent, 2e9, is a whole number."""
        text = node.value.replace("_", "")
        if len(text) > 30:
            raise _fault(node, f"{text[:20]}… has more digits than any number of a recipe")
        value = float(text)
        if not math.isfinite(value):
            raise _fault(node, f"{text} is too large")
        return int(value) if "e" in text.lower() and value.is_integer() else value


def _fault(node: yaml.Node | yaml.Event, problem: str) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


KINDS = {  # tag → how the plain text of such a value looks, and the characters that it may begin with
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9][0-9_]{0,25}", list("-+0123456789")),
    "float": (r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
}
TAG = "tag:yaml.org,2002:"
for _kind, (_pattern, _first) in KINDS.items():
    _Core.add_implicit_resolver(TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)
_Core.add_constructor(TAG + "null", lambda loader, node: None)
_Core.add_constructor(TAG + "bool", lambda loader, node: node.value.lower() == "true")
_Core.add_constructor(TAG + "int", lambda loader, node: int(node.value.replace("_", "")))
_Core.add_constructor(TAG + "float", _Core.number)
_Core.add_constructor(TAG + "str", _Core.text)
_Core.add_constructor(TAG + "seq", lambda loader, node: [loader.construct_object(n, deep=True) for n in node.value])
_Core.add_constructor(TAG + "map", _Core.mapping)

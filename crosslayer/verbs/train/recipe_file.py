"""Reads recipes: YAML of the core schema, files that extend one another, settings on top, a line of what is wrong.

A file may come from anyone. `yes`, dates and octal digits are text, 3e-4 is a number; tags, aliases and keys that stand
twice are refused.
"""

import copy
import difflib
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, GetPydanticSchema, ValidationError, with_config
from typing_extensions import TypedDict  # that of Python 3.11 is not known to pydantic

LARGEST = 2**16  # bytes of a file
EXAMPLES = {"model": "{size: tiny}", "schedule": "{steps: 1000}"}  # of keys that have no default
AnyRecipe = TypeVar("AnyRecipe", bound=BaseModel)
Keys = tuple[Any, ...]  # of mappings and lists, from the top
Source = tuple[str, dict[str, Any]]  # a file or a setting, and what it says


class WrongKey(ValueError):
    """A mapping has a key that does not belong there."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


def read_recipe(kind: type[AnyRecipe], path: str | Path, settings: Sequence[str] = ()) -> AnyRecipe:
    """Read a recipe and check it; no file of data is opened.

    Mappings of files merge key by key, and the extending file wins; lists, methods and all else are replaced, and
    settings, such as "train.learning_rate=3e-4", replace what they name. A name is not inherited; the default is the
    file's. What is wrong is a ValueError of one line: the file or setting, the key, and the fault.
    """
    sources = _files(Path(path), ())
    values: dict[str, Any] = {"name": Path(path).stem}
    for _, over in sources:
        values = _merged(values, over)
    values = copy.deepcopy(values)  # which settings change, and no source's own
    for setting in settings:
        sources.append(_apply(values, " ".join(setting.split())))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        found: dict[Keys, list[Any]] = {}
        for each in error.errors(include_url=False):
            found.setdefault(_place(each, values), []).append(each)
        first = next(iter(found))
        keys = max((place for place in found if place[: len(first)] == first), key=len)  # in the likeliest of a union
        fault = found[keys][0]
        cause, missing = fault.get("ctx", {}).get("error"), fault["type"] == "missing"
        message = ", or ".join(dict.fromkeys(each["msg"] for each in found[keys])) if cause is None else str(cause)
        if missing and keys[-1] in EXAMPLES:
            message += f"; write for example {keys[-1]}: {EXAMPLES[keys[-1]]}"
        elif cause is None and not missing:
            message += f"; it is {'null' if fault['input'] is None else reprlib.repr(fault['input'])}"
        named = keys[:-1] if missing else (*keys, cause.key) if isinstance(cause, WrongKey) else keys
        writer = _writer(sources, named) if named else str(path)  # of what is missing at the top
        raise ValueError(": ".join(filter(None, (writer, ".".join(map(str, keys)), message)))) from None


def _place(fault: Any, values: Any) -> Keys:
    """Return the keys of the input that lead to a fault; what pydantic adds, such as a union's members, are none."""
    keys: Keys = ()
    for part in fault["loc"]:
        if part in _keys(values):
            keys, values = (*keys, part), values[part]
    return (*keys, fault["loc"][-1]) if fault["type"] == "missing" else keys


def _keys(values: Any) -> Collection[Any]:
    return values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()


def nearest(name: str, names: Sequence[str]) -> str:
    """Return what is said to a name that is not among `names`."""
    close = [other for other in names if name and other.startswith(name)] or difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"


def one_of(names: Collection[str]) -> AfterValidator:
    """Refuse other text than these names; say which is nearest."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"{name!r} is not known; {nearest(name, list(names))}")
        return name

    return AfterValidator(check)


def only_keys(known: Collection[str], elsewhere: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return what refuses other keys of a mapping; of those that are set elsewhere it says why."""

    def check(values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key in elsewhere:
                raise WrongKey(key, f"{key} is not set here: {elsewhere[key]}")
            if key not in known:
                name = key if key.isprintable() else ascii(key)
                raise WrongKey(key, f"{name} is not known; {nearest(key, list(known))}")
        return values

    return check


def typed_keys(kinds: Mapping[str, Any]) -> GetPydanticSchema:
    """Have a mapping checked as one of these keys with values of these types, all of which may be missing."""
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    kind = with_config(config)(TypedDict("Keys", kinds, total=False))  # type: ignore[operator, misc]
    return GetPydanticSchema(lambda source, handler: handler(kind))


def _files(path: Path, above: tuple[Path, ...]) -> list[Source]:
    """Read a file and those that it extends, the lowest first; `above` are those that lead to it."""
    if path.resolve() in [reader.resolve() for reader in above]:
        raise ValueError(f"{above[-1]}: extends goes in a circle: {' → '.join(p.name for p in (*above, path))}")
    if not path.is_file():
        reader = f"{above[-1]}: extends: " if above else "recipe "
        names = sorted(str(other) for other in path.parent.glob("[!.]*.y*ml") if other not in above)
        hint = nearest(str(path), names) if names else "it must be a YAML file"
        raise ValueError(f"{reader}{str(path)!r} {'is a folder' if path.is_dir() else 'does not exist'}; {hint}")
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
    base = values.pop("extends", None)
    if base is None:
        return [(str(path), values)]
    if not isinstance(base, str):
        raise ValueError(f"{path}: extends is {base!r}; it must be the name of a file beside this one")
    below = _files(Path(os.path.normpath(path.parent / base)), (*above, path))
    for _, inherited in below:
        inherited.pop("name", None)
    return [*below, (str(path), values)]


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = under | over
    for key in under.keys() & over.keys() - {"method"}:  # options belong to a method's name
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            merged[key] = _merged(under[key], over[key])
    return merged


def _apply(values: dict[str, Any], setting: str) -> Source:
    """Write a setting into the values, and return it as a source."""
    place = f"--set {setting}"
    name, equals, text = setting.partition("=")
    words = name.strip().split(".")
    if not equals or not all(words):
        raise ValueError(f"{place}: it must be key=value, for example train.learning_rate=3e-4")
    parent: Any = values
    keys: list[Any] = []
    for word in words:
        if keys:
            parent = parent[keys[-1]]
        above = ".".join(words[: len(keys)])
        if isinstance(parent, list):
            if not word.isdecimal() or int(word) >= len(parent):
                raise ValueError(f"{place}: {above} is a list; its entries are 0 to {len(parent) - 1}, not {word!r}")
            keys.append(int(word))
        elif isinstance(parent, dict):
            keys.append(word)
            if len(keys) < len(words) and parent.get(word) is None:
                parent[word] = {}
        else:
            raise ValueError(f"{place}: {above} is {parent!r}, which has no key {word!r}")
    said = parent[keys[-1]] = parse_value(text, place)
    for key in reversed(keys):
        said = {key: said}
    return place, said


def _writer(sources: Sequence[Source], keys: Keys) -> str:
    """Return the last source of those that say most of the way to a value."""

    def depth(source: Source) -> int:
        values: Any = source[1]
        for number, key in enumerate(keys):
            if key not in _keys(values):
                return number
            values = values[key]
        return len(keys)

    return max(reversed(sources), key=depth)[0]


def parse_value(text: str, place: str) -> Any:
    """Return the value of YAML text: plain data that JSON can hold."""
    try:
        value = yaml.load(text, _Core)  # noqa: S506  builds nothing but plain data
        json.dumps(value, ensure_ascii=False).encode()  # without halves of characters (surrogates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text else ""
        raise ValueError(f"{place}{line}: {' '.join(str(error.problem or error.context).split())}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{place}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ValueError(f"{place}: it is nested too deeply") from None
    return value


class _Core(yaml.SafeLoader):
    """Builds text, numbers, truth values, null, lists and mappings, and refuses everything else."""

    yaml_implicit_resolvers = {}

    def compose_node(self, parent, index):
        """Refuse aliases, few lines of which may stand for terabytes or for themselves, and tags."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _fault(event, f"*{event.anchor} is an alias; write the value out, or use extends")
        if event.tag is not None:
            raise _fault(event, f"the tag {event.tag} is not read; leave it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        """Refuse keys that are no words or stand twice."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                fault = "stands twice" if isinstance(key, str) else "is not a word"
                raise _fault(key_node, f"the key {key!r} {fault}")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _fault(node: Any, problem: str) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _number(text: str) -> int | float:
    """Return a number; a whole one with an exponent, 2e9, is a whole number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return int(value) if "e" in text.lower() and value.is_integer() else value


PLAIN = {  # tag → how the plain text of such a value looks, the characters that it may begin with, and how it is read
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF"), lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+(_[0-9]+)*", list("-+0123456789"), int),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789"), _number),
}
for _kind, (_pattern, _first, _read) in PLAIN.items():
    _tag = f"tag:yaml.org,2002:{_kind}"
    _Core.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
    _Core.add_constructor(_tag, lambda loader, node, read=_read: read(node.value))

"""Reads recipes: YAML 1.2 files that extend one another, overridden key by key; an error is one line with its key.

Files may be untrusted. `yes`, dates and octal digits are text, 3e-4 is a number; tags, aliases and duplicate keys are
refused. OmegaConf would read `off` as false and 010 as 8, and merge the options of different methods.
"""

import difflib
import json
import math
import os
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    GetPydanticSchema,
    ValidationError,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict  # pydantic does not support that of Python 3.11

SHIPPED = Path(__file__).parents[1] / "recipes"  # comes with the package
# bytes of a file, which may be untrusted; shipped recipes have at most 1,500
LARGEST = 2**16
EXAMPLES = {"model": "{size: tiny}", "schedule": "{steps: 1000}"}  # of keys without a default
SHOULD = re.compile(r"^(Input|List|String|Dictionary|Value|Tuple|Keys) should ")  # how messages of pydantic begin
Keys = tuple[Any, ...]  # of mappings and lists, from the top


class WrongKey(ValueError):
    """An error at a key of a mapping."""

    def __init__(self, key: str, message: str):
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


class Part(BaseModel):
    """A section of a recipe: frozen, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        return only_keys(values, cls.model_fields, {})


def read_values(path: str | Path, settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of a recipe, unchecked; arguments as `load_recipe`."""
    values = {"name": Path(path).stem, **_read_file(Path(path), str(path), ())}
    for setting in settings:
        setting = " ".join(setting.split())
        name, equals, text = setting.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"--set must be key=value, got {setting!r}; for example train.learning_rate=3e-4")
        parent: Any = values
        for depth, key in enumerate(keys):
            above: str = ".".join(keys[:depth])
            index: Any = key
            if isinstance(parent, list):
                if not key.isdecimal() or int(key) >= len(parent):
                    raise ValueError(f"{above}: index must be 0 to {len(parent) - 1}, got {key!r} (--set {setting})")
                index = int(key)
            elif not isinstance(parent, dict):
                problem = f"must be a mapping to have the key {key!r}, got {parent!r}"
                raise ValueError(f"{above}: {problem} (--set {setting})")
            if depth == len(keys) - 1:
                parent[index] = parse_value(text, f"--set {setting}")
            # a section may be missing, or be null in a file that is extended
            elif isinstance(parent, dict) and parent.get(key) is None:
                parent[key] = {}
            parent = parent[index]
    return values


def error_message(error: ValidationError, values: Any) -> str:
    """Write pydantic's errors of the first wrong value as key: must be X, got Y."""
    by_keys: dict[Keys, list[Any]] = {}
    for each in error.errors(include_url=False):
        # the keys that lead into the values, without those that pydantic adds for members of a union
        keys: Keys = ()
        inner: Any = values
        for key in each["loc"]:
            held: dict[Any, Any] = dict(enumerate(inner)) if isinstance(inner, list) else inner
            if isinstance(held, dict) and key in held:
                keys = (*keys, key)
                inner = held[key]
        by_keys.setdefault((*keys, each["loc"][-1]) if each["type"] == "missing" else keys, []).append(each)
    first = next(iter(by_keys))
    # each member of a union reports why it does not fit; the likeliest one fits down to the deepest key
    keys = max((keys for keys in by_keys if keys[: len(first)] == first), key=len)
    errors = by_keys[keys]
    cause = errors[0].get("ctx", {}).get("error")
    if errors[0]["type"] == "missing":
        message = "missing" + (f"; for example {keys[-1]}: {EXAMPLES[keys[-1]]}" if keys[-1] in EXAMPLES else "")
    elif isinstance(cause, WrongKey):
        keys = (*keys, cause.key)
        message = cause.message
    elif cause is not None:
        message = str(cause)
    else:
        value = "null" if errors[0]["input"] is None else reprlib.repr(errors[0]["input"])
        rules = dict.fromkeys(SHOULD.sub("", each["msg"]) for each in errors)
        message = f"{'must ' if SHOULD.match(errors[0]['msg']) else ''}{' or '.join(rules)}, got {value}"
    name = ".".join(key if key.isprintable() else ascii(key) for key in map(str, keys))
    return f"{name}{': ' if name else ''}{message}"


def nearest(name: str, names: Sequence[str]) -> str:
    """Return a hint for a name that is not among `names`: the nearest one, or all of them."""
    # names that begin so come first: difflib compares lengths too, and misses a short beginning of a long name
    begun = [other for other in names if name and other.startswith(name)]
    close = begun or difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names)}"


def one_of(name: str, names: Collection[str]) -> str:
    """Return the name, which must be one of these."""
    if name not in names:
        raise ValueError(f"must be a known name, got {name!r}; {nearest(name, list(names))}")
    return name


def only_keys(values: Any, known: Collection[str], elsewhere: Mapping[str, str]) -> Any:
    """Return the values of a mapping with these keys only; `elsewhere` has reasons for some others."""
    # before pydantic's own check, which would neither give the reason nor the nearest key
    for key in values if isinstance(values, dict) else ():
        if key in elsewhere:
            raise WrongKey(key, f"cannot be set here: {elsewhere[key]}")
        if key not in known:
            raise WrongKey(key, f"unknown key, {nearest(key, list(known))}")
    return values


def typed_keys(types: Mapping[str, Any]) -> GetPydanticSchema:
    """Return a schema of a mapping with these optional keys and types of values."""
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    typed = with_config(config)(TypedDict("Keys", types, total=False))  # type: ignore[operator, misc]
    return GetPydanticSchema(lambda source, handler: handler(typed))


def shipped_recipes() -> list[Path]:
    """Return the files of the recipes that come with the package, by name."""
    return sorted(SHIPPED.glob("*.yaml"))


def _read_file(path: Path, name: str, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the values of a file over those of the one that it extends.

    `name` may be that of a shipped recipe, if there is no file; `above` are the files that extend it.
    """
    shipped = [recipe for recipe in shipped_recipes() if recipe.stem == name]
    if shipped and not path.is_file():
        path = shipped[0]
    if path.resolve() in [reader.resolve() for reader in above]:
        circle = " → ".join(each.name for each in (*above, path))
        raise ValueError(f"extends: must not form a circle, got {circle} ({above[-1]})")
    if not path.is_file():
        key, reader = ("extends: ", f" ({above[-1]})") if above else ("recipe ", "")
        # hidden files and those that extend this one are no proposals
        names = sorted(str(other) for other in path.parent.glob("[!.]*.y*ml") if other not in above)
        names += [each.stem for each in shipped_recipes()]
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{key}{str(path)!r} {problem}; {nearest(str(path), names)}{reader}")
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"a recipe must have at most {LARGEST:,} bytes, got {size:,} ({path})")
    try:
        values = parse_value(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise ValueError(f"a recipe must be UTF-8 text, got other bytes ({path})") from None
    if not isinstance(values, dict):
        content = "an empty file" if values is None else f"a {type(values).__name__}"
        raise ValueError(
            f"a recipe must hold keys and values, such as schedule: {{steps: 100}}, got {content} ({path})"
        )
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ValueError(f"extends: must be a file or the name of a shipped recipe, got {base!r} ({path})")
    under = _read_file(Path(os.path.normpath(path.parent / base)), base, (*above, path))
    # two runs of one name could not be told apart in results
    under.pop("name", None)
    return _merged(under, values)


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = under | over
    # the options of one method do not apply to another, so a method is replaced as a whole
    for key in under.keys() & over.keys() - {"method"}:
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            merged[key] = _merged(under[key], over[key])
    return merged


def parse_value(text: str, source: str) -> Any:
    """Return the value of YAML text, plain data that JSON can hold; errors end with the source in brackets."""
    try:
        value = yaml.load(text, _Core)  # noqa: S506  builds plain data only
        # fails for lone surrogates, which no file of the run could hold
        json.dumps(value, ensure_ascii=False).encode()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text else ""
        raise ValueError(f"{' '.join(str(error.problem or error.context).split())} ({source}{line})") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{str(error).splitlines()[0]} ({source})") from None
    except RecursionError:
        raise ValueError(f"nested too deeply ({source})") from None
    return value


class _Core(yaml.SafeLoader):
    """Builds text, numbers, booleans, null, lists and mappings, and refuses everything else."""

    # PyYAML's own rules are YAML 1.1: `3e-4` is text, `no` is false, `010` is eight, and 2026-11-22 a date
    yaml_implicit_resolvers = {}

    def compose_node(self, parent, index):
        """Refuse tags and aliases: a few lines of aliases can expand to terabytes or refer to themselves."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            problem = f"alias *{event.anchor} is not allowed; write the value out, or use extends"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[bad-argument-type]
        if event.tag is not None:
            problem = f"tag {event.tag} is not allowed; remove it"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[bad-argument-type]
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        """Refuse duplicate keys (PyYAML would take the last one) and keys that are not text."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = f"key {key!r} {'is duplicate' if isinstance(key, str) else 'must be text'}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _number(text: str) -> int | float:
    """Return a number; 2e9 is an integer, since tokens and steps are written so."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return int(value) if "e" in text.lower() and value.is_integer() else value


PLAIN = {  # tag → pattern of plain text, the characters that it may begin with, and how it is converted
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF"), lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+(_[0-9]+)*", list("-+0123456789"), int),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789"), _number),
}
for _kind, (_pattern, _first, _read) in PLAIN.items():
    _tag = f"tag:yaml.org,2002:{_kind}"
    _Core.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
    _Core.add_constructor(_tag, lambda loader, node, read=_read: read(node.value))

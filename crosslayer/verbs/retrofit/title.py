"""Methods in a few words: names, with the options that were set."""

from collections.abc import Sequence
from typing import Any

from crosslayer.core.method import Method, options_of
from crosslayer.output.words import ranges


def title(methods: Sequence[Method]) -> str:
    """Return the methods with the layers that they act on, such as "NAME (groups 18-21, 22-25) + NAME"."""
    return " + ".join(_title(method) for method in methods)


def _title(method: Method) -> str:
    options = []
    for option in options_of(method):
        value = vars(method)[option.name]
        if value in (None, ()) or (value == option.default and option.name != "compensation"):
            continue
        options.append(f"{option.name} {_shown(value)}")
    return f"{method.name()} ({', '.join(options)})" if options else method.name()


def _shown(value: Any) -> str:
    """Write layers as 18-21, 22-25, groups with gaps as 18+20, 19+21, and (reader, lender) as (9, 4)."""
    if not isinstance(value, list | tuple):
        return str(value)
    if all(isinstance(entry, int) for entry in value):
        return ranges(value)
    return ", ".join(_group(entry) for entry in value)


def _group(value: Any) -> str:
    if list(value) != sorted(value):
        return f"({', '.join(map(str, value))})"
    return _shown(value).replace(", ", "+")

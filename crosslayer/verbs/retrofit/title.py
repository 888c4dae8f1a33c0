"""Methods in a few words: names, with the options that were set."""

from collections.abc import Sequence
from typing import Any

from crosslayer.core.method import Method, options_of
from crosslayer.output.words import ranges


def title(methods: Sequence[Method]) -> str:
    """Return the methods with the layers that they act on, such as "NAME (groups 18-21, 22-25) + NAME"."""
    titles = []
    for method in methods:
        set_ones = []
        for option in options_of(method):
            value = vars(method)[option.name]
            if value not in (None, ()) and (value != option.default or option.name == "compensation"):
                set_ones.append(f"{option.name} {_shown(value)}")
        titles.append(f"{method.name()} ({', '.join(set_ones)})" if set_ones else method.name())
    return " + ".join(titles)


def _shown(value: Any) -> str:
    """Write layers as 18-21, 22-25, groups with gaps as 18+20, 19+21, and (reader, lender) as (9, 4)."""
    if not isinstance(value, list | tuple):
        return str(value)
    if all(isinstance(entry, int) for entry in value):
        return ranges(value)
    pairs = [list(entry) != sorted(entry) for entry in value]
    return ", ".join(
        f"({', '.join(map(str, entry))})" if is_pair else _shown(entry).replace(", ", "+")
        for entry, is_pair in zip(value, pairs, strict=True)
    )

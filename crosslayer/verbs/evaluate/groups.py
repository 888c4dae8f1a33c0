"""Groups of tasks: a name that stands for the tasks on which a paper reports a mean. groups.json has them.

A group's tasks are lists of names: the first that a folder of local tasks has, else the last.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

LOCAL = "_local"  # what the name of a task that reads local files ends in
Options = tuple[str, ...]  # names of a task


def _read() -> dict[str, tuple[Options, ...]]:
    groups = json.loads(Path(__file__).with_name("groups.json").read_text(encoding="utf-8"))
    return {name: tuple(tuple(options) for options in group["tasks"]) for name, group in groups.items()}


GROUPS = _read()


@dataclass(frozen=True)
class Selection:
    """The tasks that run, each once and in the order in which they were named, and the groups among them."""

    tasks: tuple[str, ...]
    groups: dict[str, tuple[str, ...]]


def select(names: Sequence[str], local: Collection[str] = ()) -> Selection:
    """Return the tasks that names stand for; a group takes the local form of a task wherever there is one.

    Args:
        names: tasks, or names in `GROUPS`.
        local: the tasks of the folder of one's own.

    """
    tasks: dict[str, None] = {}
    groups = {}
    for name in names:
        chosen = tuple(_choose(options, local) for options in GROUPS[name]) if name in GROUPS else (name,)
        tasks |= dict.fromkeys(chosen)
        if name in GROUPS:
            groups[name] = chosen
    return Selection(tuple(tasks), groups)


def _choose(options: Sequence[str], local: Collection[str]) -> str:
    return next((option + LOCAL for option in options if option + LOCAL in local), options[-1])

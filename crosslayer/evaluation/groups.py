"""Groups of tasks: a name that stands for the tasks on which a paper reports a mean."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LOCAL = "_local"  # what the name of a task that reads local files ends in
# a group's tasks; where there are several names, the first that a folder of local tasks has, else the last
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "resformer": (  # Table 2 of arXiv 2410.17897
        ("hellaswag",),
        ("openbookqa",),
        ("winogrande",),
        ("arc_easy",),
        ("arc_challenge",),
        ("piqa",),
    ),
    "uniattn-general": (("social_iqa",), ("commonsense_qa",)),  # arXiv 2502.00439
    "uniattn-medical": (("pubmedqa",), ("medmcqa",), ("medqa_5options", "medqa_4options")),
}


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

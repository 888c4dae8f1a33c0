"""One folder per verb: its `run.py` has a call of its name, whose signature and docstring are the list of its options.

The folder's own `__init__.py` says in plain values how a shell shows it:

- `GROUP`: the panel of `crosslayer --help` in which it stands, one of `GROUPS`;
- `ARGUMENTS`: how many of its parameters are written without a name, 1 by default;
- `PANELS`: panels of its help with the options in each, all of them in their order; "Options" is always the first;
- `NEEDS_TORCH`: whether it imports torch at once, True by default; the command line says so, since that takes seconds;
- `NEXT`: the command that most users type next, with `{model}` (its first argument) and `{out}`;
- `OUT`: the folder of results that is written when none is named; without it nothing is written, and "" asks for one.
"""

from pathlib import Path

GROUPS = ("Train", "Inspect", "Convert", "Measure", "Store", "Ship")
# in a group, what most users type first stands first; a verb that is not listed comes last
FIRST = ("train", "diagnose", "intervene", "plan", "methods", "retrofit", "heal", "measure", "needles", "generate")


def verb_names() -> list[str]:
    """Return the names of all verbs, which are those of the folders here, the most used ones first."""
    names = sorted(path.parent.name for path in Path(__file__).parent.glob("*/run.py"))
    return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))

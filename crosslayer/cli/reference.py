"""The options of the verbs as tables for the documents.

`python -m crosslayer.cli.reference docs/verbs` writes each into the page of its verb.
"""

import re
import sys
from pathlib import Path

from crosslayer.cli.declared import REQUIRED, Option, Verb, read_verb
from crosslayer.verbs import verb_names

HEAD = "| option | default | what it is |\n|---|---|---|\n"
BAR = r"\|"  # what stands for | in a cell
TABLE = re.compile(r"(?m)^\| option \| default \| what it is \|\n(?:\|.*\n)*")


def table(verb: Verb) -> str:
    """Return the table of what can be typed for a verb, in the order of `--help`."""
    rows = [(option.name.upper(), option) for option in verb.arguments]
    rows += [(option.flag, option) for option in verb.options]
    return HEAD + "".join(
        f"| `{name}` | {_default(option)} | {option.text.replace('|', BAR)} |\n" for name, option in rows
    )


def _default(option: Option) -> str:
    if option.default is REQUIRED:
        return "required"
    if option.default is None or option.default is False or option.default == ():
        return ""
    return f"`{','.join(map(str, option.default)) if option.has_commas else option.default}`"


def main() -> None:
    """Write the tables into the pages of a folder."""
    for name in verb_names():
        page = Path(sys.argv[1]) / f"{name}.md"
        text, options = page.read_text(encoding="utf-8"), table(read_verb(name))
        if not TABLE.search(text):
            text = f"{text.rstrip()}\n\n## Options\n\n{HEAD}"
        page.write_text(TABLE.sub(lambda _, options=options: options, text), encoding="utf-8")


if __name__ == "__main__":
    main()

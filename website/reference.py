"""What follows from the code: the options of every command, the keys of recipes, the table of methods, the stub.

`python website/reference.py docs` writes the page of commands as a whole, its tables into the page of recipes and the
overview of the methods, and the verbs with the classes of their results into crosslayer/__init__.pyi.
"""

import ast
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from crosslayer.cli.declared import EVERYWHERE, REQUIRED, Option, Verb, read_verb
from crosslayer.verbs import GROUPS, verb_names

HEAD = "| option | default | description |\n|---|---|---|\n"
BAR = r"\|"  # what stands for | in a cell
GUIDES = {name: name.lower() for name in ("Inspect", "Convert", "Measure", "Store", "Train")} | {"Ship": "serve"}
INTRODUCTION = """# Commands

Every command with its options, as `crosslayer COMMAND --help` prints them; `make tables` writes this page. In Python
each is a function with the same names and defaults: `crosslayer.diagnose("smollm2", sequences=8)` (`--set` is
`settings`). Names in capitals are typed without a flag.

"""
COMMON = f"""
[The start page](../README.md#results-and-exit-status) covers exit statuses and output. Each command also takes

{HEAD}%s"""
KEYS = "| key | default | what |\n|---|---|---|\n"
SHIPPED = "| recipe | description |\n|---|---|\n"
TABLE = re.compile(r"(?m)^\| (?:recipe|key|method) \|.*\n(?:\|.*\n)*")
Row = tuple[str, str, str]  # name, default, text
PACKAGE = Path(__file__).parent.parent / "crosslayer"
IMPORT = re.compile(r"^from (\S+) import (\w+) as \w+$", re.MULTILINE)


def commands_page() -> str:
    """Return the page of all commands, by group, each with what it does and the table of its options."""
    verbs = [read_verb(name) for name in verb_names()]
    groups = {group: [verb for verb in verbs if verb.group == group] for group in GROUPS}
    index = ""
    for group, its in groups.items():
        names = ", ".join(f"[{verb.command}](#{verb.command})" for verb in its)
        index += f"- **{group}** ([guide](../guides/{GUIDES[group]}.md)): {names}\n"
    sections = [section(verb) for its in groups.values() for verb in its]
    return "\n".join([INTRODUCTION + index + COMMON % _rows(EVERYWHERE), *sections])


def section(verb: Verb) -> str:
    """Return the section of a command: what it does, and the table of its options if it has any."""
    text = "\n\n".join(filter(None, (verb.call.about, verb.call.text)))
    return f"## {verb.command}\n\n{text}\n\n{table(verb)}".rstrip() + "\n"


def table(verb: Verb) -> str:
    """Return the table of what can be typed for a verb alone, in the order of `--help`."""
    own = [option for option in verb.options if option not in EVERYWHERE]
    rows = _rows(verb.arguments, named=False) + _rows(own)
    return rows and HEAD + rows


def shipped_table() -> str:
    """Return the table of the recipes that come with the package, each with the first sentence of its comment."""
    from crosslayer.training.recipe_file import shipped_recipes

    rows = []
    for path in shipped_recipes():
        lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        comment = " ".join(line.strip("# ") for line in lines)
        rows.append(f"| `{path.stem}` | {comment.partition('. ')[0].rstrip('.')}. |\n")
    return SHIPPED + "".join(rows)


def recipe_tables() -> list[str]:
    """Return the tables of the shipped recipes, and of the keys of a recipe."""
    from crosslayer.training.recipe import Recipe  # here: imports torch, and tables of options need it not

    return [shipped_table(), KEYS + _lines(_keys(Recipe))]


def methods_table(layers: int = 32) -> str:
    """Return the table of the methods."""
    from crosslayer.verbs.methods.run import methods

    head = f"| method | what | what flows | KV cache at {layers} layers | source |\n|---|---|---|---|---|\n"
    rows = [row.values() for row in methods(layers=layers).rows]
    return head + "".join(f"| `{name}` | {' | '.join(cells)} |\n" for name, *cells in rows)


def stub(text: str) -> str:
    """Return the stub of the public names with every verb: its function, and the classes of results that it returns.

    Lines of other names stay.
    """
    homes: dict[str, list[str]] = {}
    for run in sorted((PACKAGE / "verbs").glob("*/run.py")):
        name, result = run.parent.name, run.with_name("result.py")
        (call,) = (node for node in ast.parse(run.read_text()).body if getattr(node, "name", None) == name)
        assert isinstance(call, ast.FunctionDef) and call.returns is not None, f"{name} must say what it returns"
        returned = {node.id for node in ast.walk(call.returns) if isinstance(node, ast.Name)}
        classes = ast.parse(result.read_text()).body if result.is_file() else []
        homes[f"crosslayer.verbs.{name}.run"] = [name]
        homes[f"crosslayer.verbs.{name}.result"] = sorted(returned & {getattr(node, "name", "") for node in classes})
    lines = {(home, name) for home, name in IMPORT.findall(text) if home not in homes}
    lines |= {(home, name) for home, names in homes.items() for name in names}
    written = "".join(f"from {home} import {name} as {name}\n" for home, name in sorted(lines))
    return re.sub(rf"(?m)(?:{IMPORT.pattern}\n)+", lambda _: written, text, count=1)


def _keys(part: Any, prefix: str = "") -> Iterator[Row]:
    """Yield the keys of a part of a recipe, those of the parts in it behind a dot, of lists of parts behind "[]."."""
    for name, field in part.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if hasattr(kind, "model_fields")]
        if inner[:1] != [field.annotation]:
            shown = field.default is None or isinstance(field.default, str | int | float | dict)
            default = f"`{json.dumps(field.default)}`" if shown else ""
            yield f"{prefix}{name}", default, " ".join((field.description or "").split())
        for kind in inner:
            yield from _keys(kind, f"{prefix}{name}[]." if _is_list(field.annotation) else f"{prefix}{name}.")


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list


def _rows(options: Sequence[Option], *, named: bool = True) -> str:
    names = [option.flag if named else option.name.upper() for option in options]
    return _lines((name, _default(option), option.text) for name, option in zip(names, options, strict=True))


def _lines(rows: Any) -> str:
    return "".join(f"| `{name}` | {default} | {text.replace('|', BAR)} |\n" for name, default, text in rows)


def _default(option: Option) -> str:
    if option.default is REQUIRED:
        return "required"
    if option.default is None or option.default is False or option.default == ():
        return ""
    return f"`{','.join(map(str, option.default)) if option.has_commas else option.default}`"


def main() -> None:
    """Write the pages in the folder that is named."""
    docs, public = Path(sys.argv[1]), PACKAGE / "__init__.pyi"
    public.write_text(stub(public.read_text(encoding="utf-8")), encoding="utf-8")
    (docs / "reference" / "commands.md").write_text(commands_page(), encoding="utf-8")
    for name, tables in {"reference/recipes.md": recipe_tables(), "methods/overview.md": [methods_table()]}.items():
        text, waiting = (docs / name).read_text(encoding="utf-8"), iter(tables)
        (docs / name).write_text(TABLE.sub(lambda found, waiting=waiting: next(waiting, found[0]), text))


if __name__ == "__main__":
    main()

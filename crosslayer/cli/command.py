"""Turns a verb into a command: builds its options from the Python signature, runs it, and prints its result."""

import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from crosslayer import _start
from crosslayer.cli.declared import OUTPUT, REQUIRED, TEXTS, Call, Option, Verb
from crosslayer.cli.early import check_typed
from crosslayer.output.folder import check_free, check_target, free_name, locked_folder
from crosslayer.output.progress import Progress, metered_by, no_progress, print_to, say

COLORS = {"pass": "green", "fail": "red", "skip": "yellow"}  # of cells with a `Mark`
TYPES = {"int": int, "float": float, "bool": bool}
# by the option's name, else by its annotation
METAVARS = {"settings": "KEY=VALUE", "vary": "KEY=V1,V2", "allow_methods": "MODULE"}
METAVARS |= {"sweep": "KEY=V1,V2", "DomainTexts": "TEXT", "Text": "TEXT", "Sequence[str]": "<str>"}
METAVARS |= {"bool": " "}  # a flag takes no value; without this, typer says <bool>


def print_line(text: str) -> None:
    """Print a line on stdout and flush it."""
    print_to(sys.stdout, text)


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout; if that is not a terminal, lines are as long as the table needs."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    grid = Table(box=SIMPLE, pad_edge=False)
    for index, name in enumerate(head):
        # what a row is called can be copied in a narrow terminal too
        grid.add_column(name, no_wrap=index == 0)
    for cells in rows:
        texts = []
        for cell in cells:
            # a text may hold what rich reads as markup, such as [0]
            if isinstance(cell, str):
                texts.append(escape(cell))
            elif isinstance(cell, list):
                texts.append(escape("\n".join(cell)))
            else:
                texts.append(f"[{COLORS[cell.kind]}]{escape(cell.text)}[/]")
        grid.add_row(*texts)

    # rich cuts a table to 80 columns where there is no terminal
    wide = Console(width=1000)
    width = None if sys.stdout.isatty() else Measurement.get(wide, wide.options, grid).maximum
    console = Console(width=width)
    with console.capture() as capture:
        console.print(grid)
    if title:
        print_line(title)
    print_line(capture.get().rstrip("\n"))


def command_of(verb: Verb) -> Callable[..., None]:
    """Return a function from which typer makes the command."""

    def command(**typed: Any) -> None:
        run(verb, typed)

    declared: list[tuple[Option, Any]] = [(option, typer.Argument(help=option.text)) for option in verb.arguments]
    for option in verb.options:
        metavar = METAVARS.get(option.name) or METAVARS.get(option.kind)
        # the panel of the help in which it stands; None: the first one
        if verb.panels:
            panel = next(panel for panel, names in verb.panels.items() if option.name in names)
        else:
            panel = "Text" if option.kind in TEXTS else "Output" if option.name in OUTPUT else None
        declared.append((option, typer.Option(option.flag, help=option.text, metavar=metavar, rich_help_panel=panel)))

    parameters = []
    for option, info in declared:
        # another type, such as a path, is text: the verb itself checks it
        kind: Any = TYPES.get(option.kind, str)
        default: Any = inspect.Parameter.empty if option.default is REQUIRED else option.default
        if option.has_commas:
            default = ",".join(map(str, option.default))  # type: ignore[bad-argument-type]
        elif option.is_list:
            kind, default = list[str], default or None
        annotation = Annotated[kind if default is not None else kind | None, info]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(option.name, keyword, default=default, annotation=annotation))

    # typer reads these three
    command.__doc__ = f"{verb.call.about}\n\n{verb.call.text}"
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def without_folders(word: str) -> str:
    """Return a typed word with only the last part of an absolute path: records tell nothing else about a machine."""
    return re.sub(r"(^|=)[/~].*/", r"\1", word)


def run(verb: Verb, typed: dict[str, Any]) -> None:
    """Run a verb with the values that were typed, and print the result."""
    check_typed(typed)
    is_first = os.environ.get("RANK", "0") == "0"  # among the processes that torchrun starts
    # the record has the command: of absolute paths only the last part, since the rest is private
    words = [without_folders(word) for word in sys.argv[1:]]
    if verb.is_saved and verb.out and not typed["force"] and not any(word.startswith("--out") for word in words):
        typed["out"] = free_name(verb.out)
        words += ["--out", typed["out"]] if typed["out"] != verb.out else []
    out = None if typed.get("out") is None else Path(typed["out"]).expanduser().resolve()
    if out is not None and is_first:
        # a folder in use is refused before anything is imported, which takes seconds
        with locked_folder(out):
            if verb.is_saved:
                check_free(out, typed["force"])
        parts = ": report.html, record.json, figures" if verb.is_saved else ""
        say(f"the results go to {typed['out']}{parts}")
    if verb.needs_torch and "torch" not in sys.modules:
        say("importing torch and transformers")
    # before options are read, which may name what such a module defines
    if typed["allow_methods"]:
        from crosslayer.core.methods import allow_methods

        allow_methods(*typed["allow_methods"])
    call = getattr(import_module(f"crosslayer.verbs.{verb.name}.run"), verb.name)
    functions = {name: getattr(import_module(f"crosslayer.cli.{verb.name}"), name) for name in verb.beside}

    # From here on there is something to clean up. During the imports Ctrl-C ends the process, since libraries turn a
    # KeyboardInterrupt into an ImportError.
    _start.interrupts.at_once = False
    if verb.is_saved and out is not None:
        check_target(out, typed["force"])
    made = {name: function(**_values(verb.beside[name], typed)) for name, function in functions.items()}
    then = made.pop("then", None)
    arguments = _values(verb.call, typed) | made
    _start.command_line = shlex.join(["crosslayer", *words])
    _start.typed = {name: without_folders(typed[name]) for name in ("model", "out") if typed.get(name)}
    try:
        with metered_by(Progress if is_first else no_progress):
            result = call(**arguments)
        if is_first:
            _show(result, typed, verb.is_saved and out is not None)
    finally:
        _start.command_line = _start.typed = None
    if then is not None:
        then(result)
    raise typer.Exit(result.exit_status)


def _show(result: Any, typed: dict[str, Any], is_saved: bool) -> None:
    out = typed.get("out")
    page = None if out is None else Path(out) / "report.html"
    if is_saved:
        say("writing the report")
        page = result.save(out, typed["force"])
    if not typed["json"]:
        for table in result.tables():
            print_table(*table)
        for sentence in result.sentences():
            print_line(sentence)
        if page is not None and page.is_file():
            print_line(f"report: {page}")
        if following := result.next_command(typed.get("model"), out):
            print_line(f"next: {following}")
    # the last line, in characters that stdout can show
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print_line(json.dumps(result.headline(), ensure_ascii=not unicode))


def _values(call: Call, typed: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call from what was typed; texts are named by where they come from."""
    values = {}
    for option in call.parameters:
        if option.name not in typed:
            continue
        value = typed[option.name]
        if option.has_commas:
            words = [word.strip() for word in value.split(",")]
            # at most 18 digits: 64 bits hold any such number
            if option.kind != "Sequence[int]":
                value = tuple(words)
            elif all(re.fullmatch(r"-?[0-9]{1,18}", word) for word in words):
                value = tuple(map(int, words))
            else:
                form = "whole numbers separated by commas, such as " + ",".join(map(str, option.default[:2]))
                raise ValueError(f"`{option.name}` must be {form}, got {value!r}")
        elif option.is_list and option.kind not in TEXTS:
            value = tuple(value) if value else option.default
        values[option.name] = value

    texts = [option for option in call.parameters if option.kind in TEXTS]
    if not texts:
        return values
    # not imported for a verb without texts, such as `methods`
    from crosslayer.corpus.documents import TextSource
    from crosslayer.corpus.domains import check_table_options

    sources = []
    for option in texts:
        if option.name in values:
            value = values[option.name]
            named = list(map(TextSource.named, [value] if isinstance(value, str) else value or ()))
            sources += named
            values[option.name] = (named or [None])[0] if option.kind == "Text" else named
    check_table_options(sources)
    return values

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
from crosslayer.cli.declared import REQUIRED, TEXTS, Call, Option, Verb
from crosslayer.cli.early import check_typed
from crosslayer.output.folder import check_free, check_target, free_name, locked_folder
from crosslayer.output.progress import NoProgress, Progress, metered_by, print_to, say

COLORS = {"pass": "green", "fail": "red", "skip": "yellow"}  # of cells with a `Mark`
TYPES = {"int": int, "float": float, "bool": bool}
METAVARS = {"settings": "KEY=VALUE", "vary": "KEY=V1,V2", "allow_methods": "MODULE"}  # by name; else by annotation:
METAVARS |= {"sweep": "KEY=V1,V2", "DomainTexts": "TEXT", "Text": "TEXT", "Sequence[str]": "<str>"}


def print_line(text: str) -> None:
    """Print a line on stdout and flush it."""
    print_to(sys.stdout, text)


def print_headline(figures: dict[str, Any]) -> None:
    """Print the last line of a result, a JSON object, in characters that stdout can show."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print_line(json.dumps(figures, ensure_ascii=not unicode))


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout; if that is not a terminal, lines are as long as the table needs."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    grid = Table(box=SIMPLE, pad_edge=False)
    for number, name in enumerate(head):
        grid.add_column(name, no_wrap=number == 0)  # what a row is called can be copied in a narrow terminal too
    for cells in rows:
        grid.add_row(*map(_styled, cells))
    wide = Console(width=1000)
    width = None if sys.stdout.isatty() else Measurement.get(wide, wide.options, grid).maximum
    console = Console(width=width)
    with console.capture() as capture:
        console.print(grid)
    if title:
        print_line(title)
    print_line(capture.get().rstrip("\n"))


def _styled(cell: Any) -> str:
    from rich.markup import escape

    if isinstance(cell, str):
        return escape(cell)
    if isinstance(cell, list):
        return escape("\n".join(cell))
    return f"[{COLORS[cell.kind]}]{escape(cell.text)}[/]"


def command_of(verb: Verb) -> Callable[..., None]:
    """Return a function from which typer makes the command."""

    def command(**typed: Any) -> None:
        run(verb, typed)

    parameters = [_parameter(option, typer.Argument(help=option.text)) for option in verb.arguments]
    for option in verb.options:
        metavar = METAVARS.get(option.name) or METAVARS.get(option.kind)
        named = typer.Option(option.flag, help=option.text, metavar=metavar, rich_help_panel=verb.panel(option))
        parameters.append(_parameter(option, named))
    command.__doc__ = f"{verb.call.about}\n\n{verb.call.text}"
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(option: Option, declared: Any) -> inspect.Parameter:
    """Return a parameter of the annotated type; a type that is not in `TYPES` is text."""
    kind: Any = TYPES.get(option.kind, str)
    default = inspect.Parameter.empty if option.default is REQUIRED else option.default
    if option.has_commas:
        default = ",".join(map(str, option.default))
    elif option.is_list:
        kind, default = list[str], default or None
    annotation = Annotated[kind if default is not None else kind | None, declared]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def run(verb: Verb, typed: dict[str, Any]) -> None:
    """Run a verb with the values that were typed, and print the result."""
    check_typed(typed)
    is_first = os.environ.get("RANK", "0") == "0"  # among the processes that torchrun starts
    words = [re.sub(r"(^|=)[/~].*/", r"\1", word) for word in sys.argv[1:]]  # absolute paths: the last part only
    if verb.is_saved and verb.out and not typed["force"] and not any(word.startswith("--out") for word in words):
        typed["out"] = free_name(verb.out)
        words += ["--out", typed["out"]] if typed["out"] != verb.out else []
    out = None if typed.get("out") is None else Path(typed["out"]).expanduser().resolve()
    if out is not None and is_first:
        with locked_folder(out):  # a folder in use is refused before anything is imported
            if verb.is_saved:
                check_free(out, typed["force"])
        parts = ": report.html, record.json, figures" if verb.is_saved else ""
        say(f"the results go to {typed['out']}{parts}")
    if verb.needs_torch and "torch" not in sys.modules:  # which takes seconds
        say("importing torch and transformers")
    if typed["allow_methods"]:
        from crosslayer.core.methods import allow_methods

        allow_methods(*typed["allow_methods"])
    call = getattr(import_module(f"crosslayer.verbs.{verb.name}.run"), verb.name)
    own = {name: getattr(import_module(f"crosslayer.cli.{verb.name}"), name) for name in verb.beside}
    _start.interrupts.at_once = False
    if verb.is_saved and out is not None:
        check_target(out, typed["force"])
    made = {name: function(**_values(verb.beside[name], typed)) for name, function in own.items()}
    then = made.pop("then", None)
    arguments = _values(verb.call, typed) | made
    _start.command_line = shlex.join(["crosslayer", *words])
    try:
        with metered_by(Progress if is_first else NoProgress):
            result = call(**arguments)
        if is_first:
            _show(result, typed, verb.is_saved and out is not None)
    finally:
        _start.command_line = None
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
    print_headline(result.headline())


def _values(call: Call, typed: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for option in call.parameters:
        if option.name not in typed:
            continue
        value = typed[option.name]
        if option.has_commas:
            value = _split(option, value)
        elif option.is_list and option.kind not in TEXTS:
            value = tuple(value) if value else option.default
        values[option.name] = value
    if any(option.kind in TEXTS for option in call.parameters):
        _name_texts(call, values)
    return values


def _name_texts(call: Call, values: dict[str, Any]) -> None:
    """Replace the names of texts among the values by where those texts come from."""
    from crosslayer.corpus.documents import TextSource
    from crosslayer.corpus.domains import check_table_options

    sources = []
    for option in call.parameters:
        if option.kind in TEXTS and option.name in values:
            value = values[option.name]
            named = list(map(TextSource.named, [value] if isinstance(value, str) else value or ()))
            sources += named
            values[option.name] = (named or [None])[0] if option.kind == "Text" else named
    check_table_options(sources)


def _split(option: Option, text: str) -> tuple[Any, ...]:
    """Return comma-separated values, as whole numbers if the option takes those."""
    values = [value.strip() for value in text.split(",")]
    if option.kind != "Sequence[int]":
        return tuple(values)
    if not all(re.fullmatch(r"-?[0-9]{1,18}", value) for value in values):
        example = ",".join(map(str, option.default[:2]))
        raise ValueError(f"`{option.name}` must be whole numbers separated by commas, such as {example}, got {text!r}")
    return tuple(map(int, values))

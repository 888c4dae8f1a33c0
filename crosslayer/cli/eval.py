"""`crosslayer eval`."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from crosslayer.cli.options import (
    AllowMethods,
    Debug,
    Device,
    Dtype,
    Force,
    Seed,
    command_line,
    importing,
    print_headline,
    print_line,
    print_table,
)
from crosslayer.evaluation.groups import GROUPS
from crosslayer.output.progress import Progress, say

NAMES = f"Tasks of lm-eval with commas between, or groups: {', '.join(GROUPS)}."
OWN = "Folder of task files of your own; their templates run in a sandbox."


def command(
    model: Annotated[str, typer.Argument(help="The candidate: hub name, local folder, or smollm2 (embedded).")],
    tasks: Annotated[str, typer.Option(help=NAMES)],
    baseline: Annotated[str | None, typer.Option(help="A model to compare with, item by item.")] = None,
    include_path: Annotated[Path | None, typer.Option(help=OWN)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first items of each task; default all.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each item; default as the task has it.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests at once: auto, or a number.")] = "auto",
    evict: Annotated[str | None, typer.Option(help="What the candidate's cache evicts, as h2o:0.4.")] = None,
    cost: Annotated[bool, typer.Option("--cost", help="Measure cache and times beside the baseline too.")] = False,
    seed: Seed = 0,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let files of --include-path run Python code that they name.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, record.json and lm-eval's files.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Score a model on tasks of lm-eval; beside a baseline, with paired differences and their intervals."""
    with importing():
        from crosslayer.evaluation.run import evaluate
        from crosslayer.evaluation.words import sentences
        from crosslayer.output.folder import check_target

    if out is not None:
        check_target(out, force)
    evaluation = evaluate(
        model,
        tasks=tasks,
        baseline=baseline,
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        batch=_batch(batch),
        evict=evict,
        cost=cost,
        seed=seed,
        allow_code=allow_code,
        dtype=dtype,
        device=device,
        progress=Progress,
    ).model_copy(update={"command": command_line()})
    _print_tables(evaluation)
    for sentence in sentences(evaluation):
        print_line(sentence)
    if out is not None:
        say("drawing figures and writing the report")
        print_line(f"report: {evaluation.save(out, force)}")
    print_headline(evaluation.headline())


def _batch(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--batch is {text!r}; it is auto or a number of requests, at least 1")
    return int(text)


def _print_tables(evaluation: Any) -> None:
    """Print the tables of the page that come first."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    from crosslayer.evaluation.page import tables
    from crosslayer.output.page import Mark

    for title, head, rows in tables(evaluation):
        grid = Table(*head, box=SIMPLE, pad_edge=False)
        for cells in rows:
            grid.add_row(*(escape(cell.text if isinstance(cell, Mark) else cell) for cell in cells))
        wide = Console(width=1000)
        fitting = Measurement.get(wide, wide.options, grid).maximum
        print_line(title)
        print_table(grid, None if sys.stdout.isatty() else fitting)

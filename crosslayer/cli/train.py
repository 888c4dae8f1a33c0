"""`crosslayer train`."""

from pathlib import Path
from typing import Annotated

import typer

from crosslayer.cli.options import (
    AllowMethods,
    Debug,
    command_line,
    importing,
    print_headline,
    print_line,
)
from crosslayer.output.progress import Progress, Silent, say


def command(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file, such as recipes/smoke.yaml.")],
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoints, log, model, report.html, record.json.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="On top of the recipe: train.learning_rate=3e-4."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")] = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Train a model by a recipe, from scratch or on from a model; exit status 1 says that it ended too soon."""
    with importing():
        from crosslayer.training.page import sentences
        from crosslayer.training.run import is_first, train
        from crosslayer.training.trainer import TrainingStopped

    meter = Progress if is_first() else Silent
    try:
        run = train(recipe, out, settings=set_ or (), resume=resume, command=command_line(), progress=meter)
    except TrainingStopped as stop:
        say(f"crosslayer: error: {stop}")
        raise typer.Exit(1) from None
    if not is_first():
        return
    for sentence in sentences(run):
        print_line(sentence)
    print_line(f"report: {out / 'report.html'}")
    print_headline(run.headline())

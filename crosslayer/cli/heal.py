"""`crosslayer heal`."""

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
from crosslayer.output.progress import Progress, say


def command(
    retrofits: Annotated[list[Path], typer.Argument(help="Folders of `crosslayer retrofit`, of the same original.")],
    recipe: Annotated[Path, typer.Option(help="A recipe: a YAML file, such as recipes/heal-smoke.yaml.")],
    out: Annotated[Path, typer.Option(help="Folder of the result: stages, models, report.html, record.json.")],
    original: Annotated[
        str | None, typer.Option(help="The model that they come from; default: what their receipts say.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="On top of the recipe: stages.0.schedule.steps=20."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in the folder; what is whole is not redone.")] = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Train retrofits until they recover, and measure them after each stage; exit status 1: it ended too soon."""
    with importing():
        from crosslayer.recovery.run import heal
        from crosslayer.training.trainer import TrainingStopped

    try:
        recovery = heal(
            retrofits,
            recipe,
            out,
            original=original,
            settings=set_ or (),
            resume=resume,
            command=command_line(),
            progress=Progress,
        )
    except TrainingStopped as stop:
        say(f"crosslayer: error: {stop}")
        raise typer.Exit(1) from None
    for sentence in recovery.sentences():
        print_line(sentence)
    print_line(f"report: {out / 'report.html'}")
    print_headline(recovery.headline())

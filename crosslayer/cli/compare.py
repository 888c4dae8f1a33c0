"""`crosslayer compare`."""

from pathlib import Path
from typing import Annotated

import typer

from crosslayer.cli.options import (
    AllowMethods,
    Debug,
    Force,
    command_line,
    importing,
    print_headline,
    print_line,
)
from crosslayer.output.progress import Progress, say


def command(
    out: Annotated[Path, typer.Option(help="Folder of report.html and record.json; with a recipe, of the runs too.")],
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of training runs, or folders that hold such.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Instead of runs: train them by this recipe.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="What is compared: 'vanilla, NAME, {name: NAME, option: 2}, [NAME, NAME]'.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each; default 3, and intervals need them.")] = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V1,V2", help="Settings to compare in: model.size=tiny,mini.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="On top of the recipe: train.learning_rate=3e-4."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="The same for every run: time=60 (seconds), flops=1e14 or tokens=1e6.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="With what is compared; default vanilla, or the first.")] = None,
    smooth: Annotated[
        int | None, typer.Option(min=1, help="Steps over which curves are smoothed; default a twentieth of a run.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep finished runs, and go on with the others.")] = False,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Compare training runs seed by seed, or train them by a recipe first; exit status 1: a disk was full."""
    with importing():
        from crosslayer.comparison.run import compare
        from crosslayer.comparison.words import sentences
        from crosslayer.output.folder import check_target
        from crosslayer.training.trainer import TrainingStopped

    if recipe is None:
        check_target(out, force)
    elif force:
        raise ValueError("--force would remove trained runs; use --resume, or name another folder")
    try:
        comparison = compare(
            runs,
            None if recipe is None else out,
            recipe=recipe,
            methods=methods,
            seeds=seeds,
            vary=vary,
            settings=set_ or (),
            budget=budget,
            baseline=baseline,
            smooth=smooth,
            resume=resume,
            command=command_line(),
            progress=Progress,
        )
    except TrainingStopped as stop:
        say(f"crosslayer: error: {stop}")
        raise typer.Exit(1) from None
    if recipe is None:
        comparison.save(out, force)
    for sentence in sentences(comparison):
        print_line(sentence)
    print_line(f"report: {out / 'report.html'}")
    print_headline(comparison.headline())

"""`crosslayer needles`."""

from pathlib import Path
from typing import Annotated, Any

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
    whole_numbers,
)
from crosslayer.output.progress import Progress, say


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    baseline: Annotated[str | None, typer.Option(help="A model that is asked the same, named in the same way.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of prompt and answer, with commas between.")] = "256,512,1024",
    depths: Annotated[
        str, typer.Option(help="Where the needle stands: 0 (beginning) to 100 (end).")
    ] = "0,25,50,75,100",
    keys: Annotated[int, typer.Option(min=1, help="Needles in a text; one is asked for.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each length with each depth.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Samples at once.")] = 8,
    evict: Annotated[str | None, typer.Option(help="What the model's cache evicts, as h2o:0.4.")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, record.json and the figures.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Hide numbers in long texts and ask for one of them (RULER), by length and depth, beside a baseline if wanted."""
    wanted = whole_numbers("--lengths", lengths, example="256,512"), whole_numbers("--depths", depths, 0, "0,50,100")
    with importing():
        from crosslayer.needles.run import find_needles
        from crosslayer.needles.words import sentences
        from crosslayer.output.folder import check_target

    if out is not None:
        check_target(out, force)
    found = find_needles(
        model,
        baseline=baseline,
        lengths=wanted[0],
        depths=wanted[1],
        keys=keys,
        samples=samples,
        new_tokens=new_tokens,
        batch=batch,
        evict=evict,
        seed=seed,
        dtype=dtype,
        device=device,
        progress=Progress,
    ).model_copy(update={"command": command_line()})
    _print_maps(found)
    for sentence in sentences(found):
        print_line(sentence)
    if out is not None:
        say("drawing figures and writing the report")
        print_line(f"report: {found.save(out, force)}")
    print_headline(found.headline())


def _print_maps(found: Any) -> None:
    """Print a table for each model: a row for each length, a column for each depth."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from crosslayer.needles.words import percent

    depths = found.settings.depths
    for side in found.sides:
        table = Table(box=SIMPLE, pad_edge=False, title=escape(side.name), title_justify="left")
        for name in ("length", *(f"depth {depth}%" for depth in depths), "all"):
            table.add_column(name, justify="right", no_wrap=True)
        for place, whole in enumerate(side.by_length):
            row = side.cells[place * len(depths) : (place + 1) * len(depths)]
            table.add_row(f"{whole.length:,}", *(percent(score.share) for score in (*row, whole)))
        print_table(table)

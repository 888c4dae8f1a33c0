"""`crosslayer verify`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from crosslayer.cli.options import (
    AllowMethods,
    Debug,
    Device,
    Force,
    command_line,
    importing,
    print_headline,
    print_line,
    print_table,
)
from crosslayer.output.progress import Progress

COLOURS = {"PASS": "green", "FAIL": "red", "NOT APPLICABLE": "yellow"}
WIDTH = 120  # where the output is no terminal


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    out: Annotated[Path | None, typer.Option(help="Folder for report.html and record.json.")] = None,
    dtypes: Annotated[str, typer.Option(help="Dtypes to check, with commas between.")] = "float32,bfloat16",
    device: Device = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Prove that a causal language model is right: its files, and every way to run it."""
    with importing():
        from crosslayer.output.folder import check_target
        from crosslayer.verification.run import verify

    if out is not None:
        check_target(out, force)
    names = [name.strip() for name in dtypes.split(",")]
    verification = verify(model, dtypes=names, device=device, progress=Progress)
    verification = verification.model_copy(update={"command": command_line()})
    _print_checks(verification)
    if out is not None:
        print_line(f"report: {verification.save(out, force)}")
    print_headline(verification.headline())
    if not verification.passed:
        raise typer.Exit(1)


def _print_checks(verification: Any) -> None:
    """Print a row for each check."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from crosslayer.verification.page import UNITS, numbers

    table = Table(box=SIMPLE, pad_edge=False, caption=UNITS)
    for column in ("check", "dtype", "result", "difference", "tolerance"):
        table.add_column(column, no_wrap=True)
    table.add_column("")
    for check in verification.checks:
        status = f"[{COLOURS[check.status]}]{check.status}[/]"
        table.add_row(check.name, check.dtype or "", status, *numbers(check), escape(check.reason))
    print_table(table, None if sys.stdout.isatty() else WIDTH)

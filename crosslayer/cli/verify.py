"""`crosslayer verify`."""

import sys
import time
from pathlib import Path
from typing import Annotated

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
    public_name,
)
from crosslayer.output.progress import Progress, say


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
        from crosslayer.verification.verify_model import (
            FAIL,
            NOT_APPLICABLE,
            PASS,
            check_count,
            verify_source,
            write_record,
        )

    if out is not None:
        check_target(out, force)
    names, started = [name.strip() for name in dtypes.split(",")], time.monotonic()
    say(f"checking and loading {model}")
    with Progress("verifying", check_count(names)) as bar:
        rows = verify_source(model, dtypes=names, device=device, progress=bar.step)
    seconds = round(time.monotonic() - started, 1)
    _print_checks(rows)
    about = {"model": public_name(model), "command": command_line(), "seconds": seconds}
    if out is not None:
        print_line(f"report: {write_record(rows, about, out, force)}")
    kinds = {"passed": PASS, "failed": FAIL, "not_applicable": NOT_APPLICABLE}
    counts = {key: sum(row.status == kind for row in rows) for key, kind in kinds.items()}
    print_headline({"model": about["model"], **counts, "seconds": seconds})
    if counts["failed"]:
        raise typer.Exit(1)


def _print_checks(rows: list) -> None:
    """Print the rows of a verification."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from crosslayer.verification.page import UNITS

    colours, table = {"PASS": "green", "FAIL": "red"}, Table(box=SIMPLE, pad_edge=False, caption=UNITS)
    for column in ("check", "dtype", "result", "difference", "tolerance"):
        table.add_column(column, no_wrap=True)
    table.add_column("")
    for row in rows:
        figures = ["" if x is None else f"{x:.2g}" for x in (row.difference, row.tolerance)]
        result = f"[{colours.get(row.status, 'yellow')}]{row.status}[/]"
        table.add_row(row.name, row.dtype or "", result, *figures, escape(row.reason))
    Console(width=None if sys.stdout.isatty() else 120).print(table)

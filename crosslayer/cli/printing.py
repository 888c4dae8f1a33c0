"""Printing of results."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from crosslayer.output.progress import print_to

COLORS = {"pass": "green", "fail": "red", "skip": "yellow"}  # of cells with a `Mark`


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

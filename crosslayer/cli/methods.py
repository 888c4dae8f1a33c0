"""`crosslayer methods`."""

from typing import Annotated

import typer

from crosslayer.cli.options import Debug, importing, print_headline, print_table


def command(
    layers: Annotated[int, typer.Option(min=2, max=10_000, help="Number of layers for the cache's share.")] = 32,
    debug: Debug = False,
) -> None:
    """List the cross-layer methods: what flows between layers and what the KV cache keeps."""
    with importing():
        from rich.table import Table

        from crosslayer.show import method_table

    rows = method_table(layers)
    table = Table(*(f"KV cache, {layers} layers" if key == "cache" else key for key in rows[0]), show_lines=True)
    for row in rows:
        table.add_row(*row.values())
    print_table(table)
    print_headline({row["method"]: row["cache"] for row in rows})

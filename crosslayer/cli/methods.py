"""`crosslayer methods`."""

from typing import Annotated

import typer

from crosslayer.cli.options import AllowMethods, Debug, importing, print_headline, print_line, print_table


def command(
    name: Annotated[str | None, typer.Argument(help="A method, to see its options, diagram and cache.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=2, max=10_000, help="Number of layers shown; default 32, of a diagram 8.")
    ] = None,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """List the cross-layer methods, or describe one: what flows between layers and what the KV cache keeps."""
    if name is None:
        _print_table(layers or 32)
    else:
        _print_method(name, layers or 8)


def _print_table(layers: int) -> None:
    with importing():
        from rich.table import Table

        from crosslayer.cli.catalogue import method_table

    rows = method_table(layers)
    table = Table(*(f"KV cache, {layers} layers" if key == "cache" else key for key in rows[0]), show_lines=True)
    for row in rows:
        table.add_row(*row.values())
    print_table(table)
    print_headline({row["method"]: row["cache"] for row in rows})


def _print_method(name: str, layers: int) -> None:
    with importing():
        from crosslayer.cli.catalogue import describe
        from crosslayer.methods import method_class

    cls = method_class(name)
    print_line(describe(cls, layers))
    print_headline({"method": cls.name(), "cache": f"{cls.example(layers).plan(layers).cached_fraction():.2%}"})

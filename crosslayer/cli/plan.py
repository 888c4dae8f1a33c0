"""`crosslayer plan`."""

from typing import Annotated

import typer

from crosslayer.cli.options import AllowMethods, Debug, importing, print_headline, print_line


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder (config.json is enough), smollm2 or minilm.")],
    length: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 4096,
    dtype: Annotated[str | None, typer.Option(help="Of the cache; default the checkpoint's own.")] = None,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Show the wiring of a model from its config alone: who reads whom, masks, residual, and bytes of the cache."""
    with importing():
        from crosslayer.wiring.read import read_plan

    plan = read_plan(model, length=length, dtype=dtype)
    print_line(plan.diagram())
    for sentence in plan.words():
        print_line(sentence)
    print_headline(plan.headline())

"""`crosslayer push`."""

from pathlib import Path
from typing import Annotated

import typer

from crosslayer.cli.options import Debug, importing, print_headline, print_line
from crosslayer.output.progress import Progress


def command(
    source: Annotated[Path, typer.Argument(help="The folder of a retrofit, of a healed model or of an export.")],
    repo: Annotated[
        str, typer.Argument(help="NAME or OWNER/NAME on the Hugging Face hub; made where it is not there.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card; upload nothing and ask nobody.")] = False,
    debug: Debug = False,
) -> None:
    """Upload a model's folder with its card, receipt and manifest to the Hugging Face hub."""
    with importing():
        from crosslayer.publication.run import push

    pushed = push(source, repo, private=private, dry_run=dry_run, progress=Progress)
    print_line(pushed.card if pushed.url is None else f"uploaded: {pushed.url}")
    print_headline(pushed.headline())

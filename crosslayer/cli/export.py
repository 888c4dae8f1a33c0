"""`crosslayer export`."""

from pathlib import Path
from typing import Annotated

import typer

from crosslayer.cli.options import AllowMethods, Debug, Force, importing, print_headline, print_line
from crosslayer.output.progress import Progress


def command(
    model: Annotated[str, typer.Argument(help="A retrofit's folder, another local folder, a hub name, or smollm2.")],
    to: Annotated[str, typer.Option(help="hf (a stock class of transformers), deci (vLLM) or gguf (llama.cpp).")],
    out: Annotated[Path, typer.Option(help="Folder for the model, its card and its manifest.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default as the weights are stored.")
    ] = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Write a model in a form that needs no crosslayer."""
    with importing():
        from crosslayer.formats.run import export
        from crosslayer.output.folder import check_target

    check_target(out, force)
    exported = export(model, out, to=to, dtype=dtype, force=force, progress=Progress)
    print_line(
        f"{exported.architecture}: {exported.layers} layers, {exported.parameters / 1e6:.1f} M parameters, "
        f"{exported.bytes:,} bytes, in {exported.dtype}."
    )
    print_headline(exported.headline())

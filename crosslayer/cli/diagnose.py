"""`crosslayer diagnose`."""

from pathlib import Path
from typing import Annotated

import typer

from crosslayer.cli.options import (
    AllowMethods,
    Bos,
    Column,
    Config,
    Debug,
    Device,
    Dtype,
    Force,
    Length,
    Seed,
    Sequences,
    Split,
    Text,
    command_line,
    importing,
    print_headline,
    print_line,
)
from crosslayer.output.progress import Progress, say


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 or minilm (embedded).")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, record.json and the figures.")] = Path("diagnosis"),
    text: Text = None,
    config: Config = None,
    split: Split = "train",
    column: Column = "text",
    sequences: Sequences = 8,
    length: Length = 512,
    seed: Seed = 0,
    bos: Bos = "auto",
    cross_layer: Annotated[bool, typer.Option("--cross-layer", help="Also compare with two-layer attention.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Show sinks, value drains, peaks, concentration and redundancy of every layer of a pretrained model."""
    with importing():
        from crosslayer.corpus.documents import TextSource
        from crosslayer.corpus.domains import check_table_options
        from crosslayer.diagnosis.scan import diagnose
        from crosslayer.output.folder import check_target

    check_target(out, force)
    source = TextSource(text, config, split, column)
    check_table_options([source])
    diagnosis = diagnose(
        model,
        source,
        sequences=sequences,
        length=length,
        seed=seed,
        bos=bos,
        cross_layer=cross_layer,
        dtype=dtype,
        device=device,
        progress=Progress,
    )
    settings = diagnosis.settings.model_copy(update={"command": command_line()})
    diagnosis = diagnosis.model_copy(update={"settings": settings})
    say("drawing figures and writing the report")
    page = diagnosis.save(out, force)
    for sentence in diagnosis.words:
        print_line(sentence)
    print_line(f"report: {page}")
    print_headline({**diagnosis.headline(), "report": str(page)})

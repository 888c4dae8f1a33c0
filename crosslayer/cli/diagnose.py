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
    public_name,
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
        from crosslayer.corpus.documents import TextSource, load_documents
        from crosslayer.corpus.domains import check_table_options
        from crosslayer.corpus.windows import check_size, packed
        from crosslayer.diagnosis.scan import diagnose as run
        from crosslayer.diagnosis.write import write_diagnosis
        from crosslayer.models.load import load_model
        from crosslayer.output.folder import check_target
        from crosslayer.probe.tokens import check_length

    check_target(out, force)
    source = TextSource(text, config, split, column)
    check_table_options([source])
    say(f"reading {source.describe()}")
    documents = load_documents(source, seed)
    check_size(documents, sequences, length)
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    check_length(loaded, length)
    say("cutting the text into tokens")
    windows = packed(documents, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos)
    settings = {
        "model": public_name(model),
        "text": source.describe(),
        "documents": list(windows.documents),
        "seed": seed,
        "bos": bos,
        "command": command_line(),
    }
    with Progress("diagnosing", sequences) as bar:
        found = run(loaded, windows.ids, tokenizer, settings=settings, progress=bar.step, cross_layer=cross_layer)
    record = found.record()
    say("drawing figures and writing the report")
    page, headline = write_diagnosis(record, out, force)
    for word in record["verdict"]["words"]:
        print_line(word)
    print_line(f"report: {page}")
    print_headline(headline)

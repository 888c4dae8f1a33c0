"""`crosslayer intervene`."""

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

DEEPEST = 10_000  # layers that no model has: what a layer's number may be before the model is known


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 or minilm (embedded).")],
    out: Annotated[Path, typer.Option(help="Folder for the report, the record and the figures.")] = Path(
        "intervention"
    ),
    waiver: Annotated[
        list[str] | None, typer.Option(help="Positions that attend only to themselves, as 255 or 255,300.")
    ] = None,
    forbid: Annotated[list[str] | None, typer.Option(help="Positions that no other token may attend to.")] = None,
    scale_values: Annotated[list[str] | None, typer.Option(help="POSITIONS:FACTOR: scale value states.")] = None,
    position_swap: Annotated[list[str] | None, typer.Option(help="POSITION:ROW of a learned position table.")] = None,
    token_swap: Annotated[list[str] | None, typer.Option(help="POSITION:TOKEN: an id, bos or random.")] = None,
    ablate: Annotated[list[str] | None, typer.Option(help="LAYER:POSITION[:zero|mean]: hidden states.")] = None,
    file: Annotated[Path | None, typer.Option(help="More interventions, as JSON or YAML.")] = None,
    layers: Annotated[str | None, typer.Option(help="Where waiver, forbid and scale-values act, as 0-11.")] = None,
    scan: Annotated[str, typer.Option(help="Ranges of layers to try alone, as 0-2,3-29; auto or none.")] = "auto",
    controls: Annotated[int, typer.Option(min=0, help="How often to try the same elsewhere.")] = 2,
    probes: Annotated[int | None, typer.Option(min=1, help="Sequences of scan and controls; default 2.")] = None,
    text: Text = None,
    config: Config = None,
    split: Split = "train",
    column: Column = "text",
    sequences: Sequences = 8,
    length: Length = 512,
    seed: Seed = 0,
    bos: Bos = "auto",
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Move, make or remove an attention sink, and show what follows, layer by layer.

    The report is about the first position that is named, in the order of the options below; --file comes last.
    """
    with importing():
        from crosslayer.corpus.documents import TextSource, load_documents
        from crosslayer.corpus.domains import check_table_options
        from crosslayer.corpus.windows import check_size, packed
        from crosslayer.intervention.apply import check_positions, parse_interventions
        from crosslayer.intervention.measure import effect, scan_groups
        from crosslayer.intervention.page import headline, words, write_intervention
        from crosslayer.intervention.record import InterventionRecord
        from crosslayer.models.load import load_model
        from crosslayer.output.folder import check_target
        from crosslayer.probe.tokens import check_length

    changes = {
        "waiver": waiver,
        "forbid": forbid,
        "scale_values": scale_values,
        "position_swap": position_swap,
        "token_swap": token_swap,
        "ablate": ablate,
    }
    check_target(out, force)
    source = TextSource(text, config, split, column)
    check_table_options([source])
    check_positions(parse_interventions(changes, file, layers, DEEPEST), length)
    scan_groups(scan, DEEPEST)
    if probes is not None and probes > sequences:
        raise ValueError(f"--probes {probes} are more than the {sequences} sequences; use at most that many")
    say(f"reading {source.describe()}")
    documents = load_documents(source, seed)
    check_size(documents, sequences, length)
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    depth = loaded.config.get_text_config().num_hidden_layers
    chosen = parse_interventions(changes, file, layers, depth)
    options = {"scan": scan_groups(scan, depth), "controls": controls, "probes": probes, "seed": seed}
    check_length(loaded, length)
    say("cutting the text into tokens")
    windows = packed(documents, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos)
    about = {
        "model": public_name(model),
        "text": source.describe(),
        "documents": list(windows.documents),
        "bos": bos,
        "command": command_line(),
    }
    with Progress("running", 2 * sequences) as bar:
        record = effect(loaded, windows.ids, *chosen, **options, settings=about, progress=bar.step).record()
    checked = InterventionRecord.model_validate(record)
    say("drawing figures and writing the report")
    page = write_intervention(record, out, force)
    for sentence in words(checked):
        print_line(sentence)
    print_line(f"report: {page}")
    print_headline({"model": about["model"], **headline(checked)})

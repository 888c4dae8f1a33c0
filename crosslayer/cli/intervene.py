"""`crosslayer intervene`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from crosslayer.cli.options import (
    Bos,
    Column,
    Config,
    Debug,
    Device,
    Dtype,
    Force,
    Length,
    Sequences,
    Split,
    Text,
    command_line,
    print_line,
    public_name,
)
from crosslayer.progress import Progress, say


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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of text and of the controls.")] = 0,
    bos: Bos = "auto",
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Move, make or remove an attention sink, and show what follows, layer by layer.

    The report is about the first position that is named, in the order of the options below; --file comes last.
    """
    from crosslayer import text as texts
    from crosslayer.effect import effect, scan_groups
    from crosslayer.intervene import WORDS, parse_interventions
    from crosslayer.models import load_model
    from crosslayer.report.intervention import headline, words, write_intervention
    from crosslayer.report.record import InterventionRecord, check_target

    given = {kind: values for kind, values in locals().items() if kind in WORDS}
    check_target(out, force)
    source = texts.TextSource(text, config, split, column)
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    depth = loaded.config.get_text_config().num_hidden_layers
    chosen = parse_interventions(given, file, layers, depth)
    ids = texts.pack(
        texts.load_documents(source, seed), tokenizer, sequences=sequences, length=length, seed=seed, bos=bos
    )
    about = {"model": public_name(model), "text": source.describe(), "bos": bos, "command": command_line()}
    options = {"scan": scan_groups(scan, depth), "controls": controls, "probes": probes, "seed": seed}
    with Progress("running", 2 * sequences) as bar:
        record = effect(loaded, ids, *chosen, **options, settings=about, progress=bar.step).record()
    checked = InterventionRecord.model_validate(record)
    page = write_intervention(record, out, force)
    for sentence in words(checked):
        print_line(sentence)
    print_line(f"report: {page}")
    print_line(json.dumps({"model": about["model"], **headline(checked)}, ensure_ascii=False))

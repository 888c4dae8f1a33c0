"""`crosslayer intervene`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

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

FORMS = {  # what is written for each kind, with colons between
    "waiver": ("positions",),
    "forbid": ("positions",),
    "scale_values": ("positions", "factor"),
    "position_swap": ("position", "source"),
    "token_swap": ("position", "token"),
    "ablate": ("layer", "position", "value"),
}


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
        from crosslayer.corpus.documents import TextSource
        from crosslayer.corpus.domains import check_table_options
        from crosslayer.intervention.entries import read_interventions
        from crosslayer.intervention.measure import effect
        from crosslayer.output.folder import check_target

    check_target(out, force)
    source = TextSource(text, config, split, column)
    check_table_options([source])
    texts = {
        "waiver": waiver,
        "forbid": forbid,
        "scale_values": scale_values,
        "position_swap": position_swap,
        "token_swap": token_swap,
        "ablate": ablate,
    }
    interventions = _parse(texts, layers) + ([] if file is None else read_interventions(file))
    if not interventions:
        raise ValueError("there is nothing to do; give an intervention, such as --waiver 255")
    result = effect(
        model,
        source,
        interventions=interventions,
        scan=scan,
        controls=controls,
        probes=probes,
        sequences=sequences,
        length=length,
        seed=seed,
        bos=bos,
        dtype=dtype,
        device=device,
        progress=Progress,
    )
    settings = result.settings.model_copy(update={"command": command_line()})
    result = result.model_copy(update={"settings": settings})
    say("drawing figures and writing the report")
    page = result.save(out, force)
    for sentence in result.words:
        print_line(sentence)
    print_line(f"report: {page}")
    print_headline(result.headline())


def _parse(texts: dict[str, list[str] | None], layers: str | None) -> list[Any]:
    """Read the interventions of a command line, texts by kind; `layers` is written as "0-11,20"."""
    from crosslayer.intervention.kinds import load_intervention
    from crosslayer.intervention.request import DEEPEST
    from crosslayer.plan import parse_layers

    chosen = None if layers is None else [layer for group in parse_layers(layers, DEEPEST) for layer in group]
    entries = [_entry(kind, text, chosen) for kind, words in texts.items() for text in words or ()]
    if chosen is not None and not any("positions" in entry for entry in entries):
        raise ValueError("--layers does nothing without --waiver, --forbid or --scale-values; leave it out")
    return [load_intervention(entry) for entry in entries]


def _entry(kind: str, text: str, layers: Sequence[int] | None) -> dict[str, Any]:
    """Read an intervention in the form that `FORMS` lists, "255,300" or "0:0.5" for example, as plain data."""
    words, names = text.split(":"), FORMS[kind]
    optional = 1 if kind == "ablate" else 0  # its value
    if not len(names) - optional <= len(words) <= len(names):
        raise ValueError(f"{kind} {text!r}: write {':'.join(names)}, with commas between positions")
    entry: dict[str, Any] = {"kind": kind, **dict(zip(names, words, strict=False))}
    if "positions" in entry:
        entry["positions"] = entry["positions"].split(",")
        if layers is not None:
            entry["layers"] = list(layers)
    return entry

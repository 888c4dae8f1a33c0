"""`crosslayer retrofit`."""

import json
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
    Seed,
    Split,
    Text,
    command_line,
    importing,
    print_line,
    public_name,
)
from crosslayer.progress import Progress, say


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    out: Annotated[Path, typer.Option(help="Folder for the model, its manifest and its receipt.")],
    method: Annotated[str | None, typer.Option(help="uniattn, cla, svformer or drop.")] = None,
    layers: Annotated[str, typer.Option(help="Groups such as 18-21,22-25 (0-based), top-half or auto.")] = "top-half",
    kv_budget: Annotated[float | None, typer.Option(help="Instead of a method: search for this cached share.")] = None,
    kl_budget: Annotated[float | None, typer.Option(help="Or search within this KL, in nats a token.")] = None,
    compensation: Annotated[str, typer.Option(help="none, zero, mean, lstsq or ridge: how W_c is fitted.")] = "ridge",
    target: Annotated[str, typer.Option(help="Where W_c writes: attention, heads or mlp.")] = "attention",
    groups: Annotated[int, typer.Option(min=1, help="v: groups of windows with a mean of their own, for mean.")] = 1,
    merge: Annotated[str, typer.Option(help="Keys and values of a CLA group: first, mean or svd.")] = "first",
    drop: Annotated[str, typer.Option(help="What drop takes away: attention, mlp or layer.")] = "attention",
    select: Annotated[str, typer.Option(help="How drop ranks with auto: similarity or greedy.")] = "similarity",
    size: Annotated[int, typer.Option(help="Layers of a superblock of top-half.")] = 4,
    count: Annotated[int | None, typer.Option(min=1, help="Followers or dropped layers of auto.")] = None,
    text: Text = None,
    config: Config = None,
    split: Split = "train",
    column: Column = "text",
    windows: Annotated[int, typer.Option(help="Windows on which the damage is measured; at least 32.")] = 64,
    calibration: Annotated[int, typer.Option(min=1, help="Windows to which W_c is fitted.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 512,
    seed: Seed = 0,
    bos: Bos = "auto",
    remote_code_shim: Annotated[bool, typer.Option("--remote-code-shim", help="Add an auto_map file.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Share or drop layers of a pretrained model, make up for it, and print what it costs and saves."""
    with importing():
        from crosslayer import text as texts
        from crosslayer.models import load_model
        from crosslayer.report.record import check_target
        from crosslayer.retrofit.folder import write_retrofit
        from crosslayer.retrofit.job import Job
        from crosslayer.retrofit.request import Request

    check_target(out, force)
    given = {key: value for key, value in locals().items() if key in Request.__dataclass_fields__}
    request, source = Request(**given), texts.TextSource(text, config, split, column)
    say(f"reading {source.describe()}")
    documents = texts.load_documents(source, seed)
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    say("cutting the text into tokens")
    outcome = Job(loaded, tokenizer, request, Progress).run(documents)
    about = {"model": public_name(model), "text": source.describe(), "command": command_line()}
    outcome.record["settings"] |= about
    say("drawing figures and writing model and report")
    sentences, found = write_retrofit(outcome, tokenizer, out, force=force, shim=remote_code_shim)
    for sentence in sentences:
        print_line(sentence)
    print_line(f"report: {out / 'report.html'}")
    print_line(json.dumps(found, ensure_ascii=False))

"""`crosslayer retrofit`."""

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
    command_line,
    importing,
    print_headline,
    print_line,
    public_name,
)
from crosslayer.output.progress import Progress, say


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    out: Annotated[Path, typer.Option(help="Folder for the model, its manifest and its receipt.")],
    method: Annotated[
        str | None,
        typer.Option(help='uniattn, cla, svformer or drop; or whole: a module of yours, {"name": "cla", "group": 3}.'),
    ] = None,
    layers: Annotated[str, typer.Option(help="Groups such as 18-21,22-25 (0-based), top-half or auto.")] = "top-half",
    kv_budget: Annotated[float | None, typer.Option(help="Instead of a method: search for this cached share.")] = None,
    kv_context: Annotated[
        int | None,
        typer.Option(help="Tokens at which the cache is counted. Default: 2048, or twice the largest window."),
    ] = None,
    kl_budget: Annotated[float | None, typer.Option(help="Or search within this KL, in nats a token.")] = None,
    compensation: Annotated[
        str | None,
        typer.Option(
            help="How W_c is fitted: layerwise (default; with --merge ridge), none, zero, mean, lstsq or ridge."
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="Where W_c writes: attention, heads or mlp.")] = "attention",
    groups: Annotated[int, typer.Option(min=1, help="v: groups of windows with a mean of their own, for mean.")] = 1,
    merge: Annotated[str, typer.Option(help="Keys and values of a CLA group: first, mean or svd.")] = "first",
    drop: Annotated[str, typer.Option(help="What drop takes away: attention, mlp or layer.")] = "attention",
    select: Annotated[str, typer.Option(help="How drop ranks with auto: similarity or greedy.")] = "similarity",
    size: Annotated[int, typer.Option(help="Layers of a superblock of top-half.")] = 4,
    count: Annotated[int | None, typer.Option(min=1, help="Followers or dropped layers of auto.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text to judge it on, repeatable: each is a domain. Default: six embedded domains."),
    ] = None,
    calibration_text: Annotated[
        list[str] | None,
        typer.Option(help="Text to fit and search on, repeatable. Default: --text, or embedded books, web and docs."),
    ] = None,
    config: Config = None,
    split: Split = "train",
    column: Column = "text",
    windows: Annotated[int, typer.Option(help="Windows to measure the damage on; at least 16 a domain.")] = 96,
    calibration: Annotated[int, typer.Option(min=1, help="Windows to which W_c is fitted, of all domains.")] = 128,
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
        from crosslayer.conversion.folder import write_retrofit
        from crosslayer.conversion.job import Job
        from crosslayer.conversion.request import Request
        from crosslayer.conversion.texts import Texts
        from crosslayer.corpus.documents import TextSource
        from crosslayer.corpus.domains import check_table_options
        from crosslayer.models.load import load_model
        from crosslayer.output.folder import check_target

    check_target(out, force)
    request = Request(
        method=method,
        layers=layers,
        compensation=compensation,
        kv_budget=kv_budget,
        kv_context=kv_context,
        kl_budget=kl_budget,
        drop=drop,
        select=select,
        size=size,
        count=count,
        merge=merge,
        target=target,
        groups=groups,
        windows=windows,
        calibration=calibration,
        length=length,
        seed=seed,
        bos=bos,
    )
    judging = [TextSource(name, config, split, column) for name in text or ()]
    fitted = [TextSource(name, config, split, column) for name in calibration_text or ()]
    check_table_options([*judging, *fitted] or [TextSource(None, config, split, column)])
    say(f"reading {', '.join(source.describe() for source in [*judging, *fitted]) or 'the embedded corpus'}")
    texts = Texts.load(judging, fitted, seed)
    texts.parts(request)  # says at once if there are too few windows
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    say("cutting the text into tokens")
    outcome = Job(loaded, tokenizer, request, Progress).run(texts)
    about = {
        "model": public_name(model),
        "text": ", ".join(texts.judging),
        **({"calibration_text": ", ".join(texts.read(request))} if texts.read(request) else {}),
        "command": command_line(),
    }
    outcome.record["settings"] |= about
    say("drawing figures and writing model and report")
    sentences, found = write_retrofit(outcome, tokenizer, out, force=force, shim=remote_code_shim)
    for sentence in sentences:
        print_line(sentence)
    print_line(f"report: {out / 'report.html'}")
    print_headline(found)

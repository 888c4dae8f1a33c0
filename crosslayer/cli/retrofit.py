"""`crosslayer retrofit`."""

from pathlib import Path
from typing import Annotated

import typer

from crosslayer.cli.heal import command as heal_command
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
)
from crosslayer.output.progress import Progress, say

METHODS = sorted(path.stem for path in (Path(__file__).parent.parent / "methods").glob("[!_]*.py"))
METHOD_HELP = (
    f"{', '.join(METHODS)}; a module of your own; or whole, as JSON: "
    '{"name": NAME, OPTION: VALUE}. `crosslayer methods` tells them.'
)


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    out: Annotated[Path, typer.Option(help="Folder for the model, its manifest and its receipt.")],
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    layers: Annotated[
        str, typer.Option(help="Groups such as 18-21,22-25 or 18+20,19+21 (0-based), top-half or auto.")
    ] = "top-half",
    kv_budget: Annotated[float | None, typer.Option(help="Instead of a method: search for this cached share.")] = None,
    kv_context: Annotated[
        int | None,
        typer.Option(help="Tokens at which the cache is counted. Default: 2048, or twice the largest window."),
    ] = None,
    kl_budget: Annotated[float | None, typer.Option(help="Or search within this KL, in nats a token.")] = None,
    compensation: Annotated[
        str | None,
        typer.Option(
            help="What makes up for it: refit (default where layers attend to borrowed states: W_c, and their W_o "
            "anew), refit-o (their W_o alone), or W_c by layerwise (default elsewhere), ridge (default with --merge), "
            "zero, mean, lstsq or lmmse; or none."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Where W_c writes: attention (default where possible), heads or mlp.")
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="v: groups of windows with a mean of their own, for mean.")] = 1,
    merge: Annotated[
        str, typer.Option(help="What a group's first layer becomes, as the method knows: first, …")
    ] = "first",
    part: Annotated[
        str | None, typer.Option(help="What of a layer goes, where the method has a choice: attention, mlp or layer.")
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Give W_c a bias.")] = False,
    select: Annotated[
        str | None,
        typer.Option(help="How auto chooses: similarity (default where possible), greedy, correlation or distance."),
    ] = None,
    size: Annotated[int, typer.Option(help="Layers of a block of top-half.")] = 4,
    count: Annotated[int | None, typer.Option(min=1, help="Layers that follow another, or go, with auto.")] = None,
    threshold: Annotated[
        float, typer.Option(min=-1, max=1, help="Least cosine of the last hidden states, for --select distance.")
    ] = 0.5,
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
    needles: Annotated[bool, typer.Option(help="Ask both models for 40 numbers hidden in long texts.")] = True,
    seed: Seed = 0,
    bos: Bos = "auto",
    heal: Annotated[
        Path | None,
        typer.Option(metavar="RECIPE", help="Then train it by this recipe into OUT-healed, as `crosslayer heal` does."),
    ] = None,
    remote_code_shim: Annotated[bool, typer.Option("--remote-code-shim", help="Add an auto_map file.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Share or take away layers of a pretrained model, make up for it, and print what it costs and saves."""
    with importing():
        from crosslayer.conversion.job import retrofit
        from crosslayer.corpus.documents import TextSource
        from crosslayer.corpus.domains import check_table_options
        from crosslayer.output.folder import check_target
        from crosslayer.recovery.recipe import load_heal_recipe

    check_target(out, force)
    healed = out.with_name(f"{out.name}-healed")
    if heal is not None:
        load_heal_recipe(heal)
        if healed.exists():
            raise ValueError(
                f"the folder {healed.name!r}, for the healed model, exists; remove it or name another `out`"
            )
    judging = [TextSource(name, config, split, column) for name in text or ()]
    fitted = [TextSource(name, config, split, column) for name in calibration_text or ()]
    check_table_options([*judging, *fitted] or [TextSource(None, config, split, column)])
    receipt = retrofit(
        model,
        judging,
        method=method,
        layers=layers,
        kv_budget=kv_budget,
        kv_context=kv_context,
        kl_budget=kl_budget,
        compensation=compensation,
        target=target,
        groups=groups,
        merge=merge,
        part=part,
        bias=bias,
        select=select,
        size=size,
        count=count,
        threshold=threshold,
        calibration_text=fitted,
        windows=windows,
        calibration=calibration,
        length=length,
        needles=needles,
        seed=seed,
        bos=bos,
        dtype=dtype,
        device=device,
        progress=Progress,
    ).model_copy(update={"command": command_line()})
    if remote_code_shim and not receipt.takes_shim:
        say(f"a stock {receipt.architecture.retrofit_class} opens without crosslayer: no shim is written")
    say("drawing figures and writing model and report")
    report = receipt.save(out, force, remote_code_shim and receipt.takes_shim)
    for sentence in receipt.sentences():
        print_line(sentence)
    print_line(f"report: {report}")
    print_headline(receipt.headline())
    if heal is not None:
        heal_command([out], heal, healed, model)

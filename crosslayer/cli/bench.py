"""`crosslayer bench`."""

from pathlib import Path
from typing import Annotated

import typer

from crosslayer.cli.options import (
    AllowMethods,
    Debug,
    Device,
    Dtype,
    Force,
    Seed,
    command_line,
    importing,
    print_headline,
    print_line,
    public_name,
)
from crosslayer.output.progress import Progress, say


def command(
    model: Annotated[str, typer.Argument(help="The candidate: hub name, local folder, or smollm2 (embedded).")],
    baseline: Annotated[str, typer.Option(help="What it is compared with: a model, named in the same way.")],
    context: Annotated[str, typer.Option(help="Lengths of the prompt in tokens, with commas between.")] = "512,2048",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after the prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs; intervals need three.")] = 5,
    attention: Annotated[str, typer.Option(help="Attention of both: sdpa (flash on a GPU) or eager.")] = "sdpa",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, record.json and the figures.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Measure cache, time to first token, time per token and memory of a model beside a baseline, in turns."""
    contexts, batches = _numbers("--context", context), _numbers("--batch", batch)
    with importing():
        from crosslayer.benchmark.compare import Settings, check
        from crosslayer.benchmark.compare import bench as run
        from crosslayer.benchmark.page import headline, sentences, show, write_bench
        from crosslayer.benchmark.record import BenchRecord
        from crosslayer.models.load import load_model
        from crosslayer.output.folder import check_target

    if out is not None:
        check_target(out, force)
    settings = Settings(contexts, batches, new_tokens, repeats, attention, seed)
    loaded = {}
    for side, name in {"candidate": model, "baseline": baseline}.items():
        say(f"loading {name}")
        loaded[side] = load_model(name, dtype=dtype, device=device)[0]
        check({side: loaded[side]}, settings)
    check(loaded, settings)
    with Progress("benchmarking", len(contexts) * len(batches) * (repeats + 1)) as bar:
        record = run(**loaded, settings=settings, progress=bar.step)
    names = {"candidate": public_name(model), "baseline": public_name(baseline)}
    record["settings"] |= {**names, "command": command_line()}
    checked = BenchRecord.model_validate(record)
    show(checked)
    for sentence in sentences(checked):
        print_line(sentence)
    if out is not None:
        say("drawing figures and writing the report")
        print_line(f"report: {write_bench(record, out, force)}")
    covered = {"interval_coverage": checked.interval_coverage}
    print_headline({**names, **covered, "results": headline(checked)})


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return whole numbers of at least 1 with commas between them, in their order and without repetitions."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise ValueError(f"{option} is {text!r}; it takes whole numbers of at least 1 with commas between, as 512,2048")
    return tuple(dict.fromkeys(int(word) for word in words))

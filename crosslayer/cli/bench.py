"""`crosslayer bench`."""

import sys
from pathlib import Path
from typing import Annotated, Any

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
    print_table,
    whole_numbers,
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
    evict: Annotated[str | None, typer.Option(help="What the candidate's cache evicts, as h2o:0.4.")] = None,
    engine: Annotated[str, typer.Option(help="What runs them: transformers or vllm.")] = "transformers",
    kv_memory: Annotated[float | None, typer.Option(help="GiB for the KV cache of each in vLLM; default 1.")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, record.json and the figures.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Measure cache, time to first token, time per token and memory of a model beside a baseline, in turns."""
    options: dict[str, Any] = {
        "contexts": whole_numbers("--context", context),
        "new_tokens": new_tokens,
        "repeats": repeats,
        "seed": seed,
        "dtype": dtype,
        "progress": Progress,
    }
    batches = whole_numbers("--batch", batch)
    with importing():
        from crosslayer.benchmark.run import bench
        from crosslayer.output.folder import check_target
        from crosslayer.serving.bench import bench_vllm

    if out is not None:
        check_target(out, force)
    if engine == "vllm":
        if device is not None or attention != "sdpa" or evict is not None:
            raise ValueError("--device, --attention and --evict are for --engine transformers; vLLM has its own")
        memory = 1.0 if kv_memory is None else kv_memory
        benchmark = bench_vllm(model, baseline, requests=batches, kv_memory=memory, **options)
    elif engine != "transformers":
        raise ValueError(f"--engine is {engine!r}; it must be transformers or vllm")
    elif kv_memory is not None:
        raise ValueError("--kv-memory is for --engine vllm; transformers allocates what is needed")
    else:
        options |= {"batches": batches, "attention": attention, "evict": evict, "device": device}
        benchmark = bench(model, baseline, **options)
    benchmark = benchmark.model_copy(update={"command": command_line()})
    print_overview(benchmark)
    for sentence in benchmark.sentences():
        print_line(sentence)
    if out is not None:
        say("writing the report")
        print_line(f"report: {benchmark.save(out, force)}")
    print_headline(benchmark.headline())


def print_overview(benchmark: Any) -> None:
    """Print the short table; where the output is no terminal, as wide as it is."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    title, head, rows = benchmark.overview()
    grid = Table(*head, show_lines=True)
    for cells in rows:
        grid.add_row(*cells)
    wide = Console(width=1000)
    fitting = Measurement.get(wide, wide.options, grid).maximum
    print_line(title)
    print_table(grid, None if sys.stdout.isatty() else fitting)

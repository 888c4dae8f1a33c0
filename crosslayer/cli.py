"""The command line: one function a verb; each parses, calls and prints."""

import json
import re
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from crosslayer.progress import Progress, say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention across depth: what one Transformer layer takes from another.",
)
INTERRUPTED = 130
Text = Annotated[str | None, typer.Option(help=".txt, .jsonl or .parquet, or a datasets name.")]
Config = Annotated[str | None, typer.Option(help="Configuration of a dataset.")]
Split = Annotated[str, typer.Option(help="Split of a dataset.")]
Column = Annotated[str, typer.Option(help="Text column of a table or dataset.")]
Bos = Annotated[str, typer.Option(help="First token: auto (as the tokenizer has it), yes or no.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …; default the GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, …; default float32 on a CPU.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences to measure; intervals need two.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens a sequence.")]
Words = Annotated[list[str] | None, typer.Option(help="Positions that attend only to themselves, as 255 or 255,300.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing folder of results.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on an error.")]


@app.callback()
def _root(debug: Debug = False) -> None:
    """Hold the options of all verbs."""


@app.command()
def diagnose(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 or minilm (embedded).")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, record.json and the figures.")] = Path("diagnosis"),
    text: Text = None,
    config: Config = None,
    split: Split = "train",
    column: Column = "text",
    sequences: Sequences = 8,
    length: Length = 512,
    seed: Annotated[int, typer.Option(help="Seed of the choice of text.")] = 0,
    bos: Bos = "auto",
    cross_layer: Annotated[bool, typer.Option("--cross-layer", help="Also compare with two-layer attention.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Show sinks, value drains, peaks, concentration and redundancy of every layer of a pretrained model."""
    from crosslayer import load_model
    from crosslayer import text as texts
    from crosslayer.probe.scan import diagnose as run
    from crosslayer.report.record import check_target
    from crosslayer.report.write import write_diagnosis

    check_target(out, force)
    source = texts.TextSource(text, config, split, column)
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    documents = texts.load_documents(source, seed)
    windows = texts.packed(documents, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos)
    settings = {
        "model": _public_name(model),
        "text": source.describe(),
        "documents": list(windows.documents),
        "seed": seed,
        "bos": bos,
        "command": _command(),
    }
    with Progress("diagnosing", sequences) as bar:
        found = run(loaded, windows.ids, tokenizer, settings=settings, progress=bar.step, cross_layer=cross_layer)
    record = found.record()
    page, headline = write_diagnosis(record, out, force)
    for word in record["verdict"]["words"]:
        _print(word)
    _print(f"report: {page}")
    _print(json.dumps(headline, ensure_ascii=False))


@app.command()
def intervene(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 or minilm (embedded).")],
    out: Annotated[Path, typer.Option(help="Folder for the report, the record and the figures.")] = Path(
        "intervention"
    ),
    waiver: Words = None,
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
    from crosslayer import load_model
    from crosslayer import text as texts
    from crosslayer.effect import effect, scan_groups
    from crosslayer.intervene import WORDS, parse_interventions
    from crosslayer.report.intervention import headline, words, write_intervention
    from crosslayer.report.record import InterventionRecord, check_target

    given = {kind: values for kind, values in locals().items() if kind in WORDS}
    check_target(out, force)
    source = texts.TextSource(text, config, split, column)
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    depth = loaded.config.get_text_config().num_hidden_layers
    chosen = parse_interventions(given, file, layers, depth)
    documents = texts.load_documents(source, seed)
    windows = texts.packed(documents, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos)
    about = {"model": _public_name(model), "text": source.describe(), "bos": bos, "command": _command()}
    about["documents"] = list(windows.documents)
    options = {"scan": scan_groups(scan, depth), "controls": controls, "probes": probes, "seed": seed}
    with Progress("running", 2 * sequences) as bar:
        record = effect(loaded, windows.ids, *chosen, **options, settings=about, progress=bar.step).record()
    checked = InterventionRecord.model_validate(record)
    page = write_intervention(record, out, force)
    for sentence in words(checked):
        _print(sentence)
    _print(f"report: {page}")
    _print(json.dumps({"model": about["model"], **headline(checked)}, ensure_ascii=False))


@app.command()
def retrofit(
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
    seed: Annotated[int, typer.Option(help="Seed of the choice of text and of the intervals.")] = 0,
    bos: Bos = "auto",
    remote_code_shim: Annotated[bool, typer.Option("--remote-code-shim", help="Add an auto_map file.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Share or drop layers of a pretrained model, make up for it, and print what it costs and saves."""
    from crosslayer import load_model
    from crosslayer import text as texts
    from crosslayer.report.record import check_target
    from crosslayer.retrofit.folder import write_retrofit
    from crosslayer.retrofit.job import Job
    from crosslayer.retrofit.request import Request

    check_target(out, force)
    given = {key: value for key, value in locals().items() if key in Request.__dataclass_fields__}
    request, source = Request(**given), texts.TextSource(text, config, split, column)
    documents = texts.load_documents(source, seed)
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    outcome = Job(loaded, tokenizer, request, Progress).run(documents)
    about = {"model": _public_name(model), "text": source.describe(), "command": _command()}
    outcome.record["settings"] |= about
    sentences, found = write_retrofit(outcome, tokenizer, out, force=force, shim=remote_code_shim)
    for sentence in sentences:
        _print(sentence)
    _print(f"report: {out / 'report.html'}")
    _print(json.dumps(found, ensure_ascii=False))


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="The candidate: hub name, local folder, or smollm2 (embedded).")],
    baseline: Annotated[str, typer.Option(help="What it is compared with: a model, named in the same way.")],
    context: Annotated[str, typer.Option(help="Lengths of the prompt in tokens, with commas between.")] = "512,2048",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after the prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs; intervals need three.")] = 5,
    attention: Annotated[str, typer.Option(help="Attention of both: sdpa (flash on a GPU) or eager.")] = "sdpa",
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, record.json and the figures.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Measure cache, time to first token, time per token and memory of a model beside a baseline, in turns."""
    from crosslayer import load_model
    from crosslayer.report.bench import headline, sentences, show, write_bench
    from crosslayer.report.record import BenchRecord, check_target
    from crosslayer.runtime.bench import Settings, check
    from crosslayer.runtime.bench import bench as run

    if out is not None:
        check_target(out, force)
    contexts, batches = _numbers("--context", context), _numbers("--batch", batch)
    settings = Settings(contexts, batches, new_tokens, repeats, attention, seed)
    loaded = {}
    for side, name in {"candidate": model, "baseline": baseline}.items():
        say(f"loading {name}")
        loaded[side] = load_model(name, dtype=dtype, device=device)[0]
    check(loaded, settings)
    with Progress("benchmarking", len(contexts) * len(batches) * (repeats + 1)) as bar:
        record = run(**loaded, settings=settings, progress=bar.step)
    names = {"candidate": _public_name(model), "baseline": _public_name(baseline)}
    record["settings"] |= {**names, "command": _command()}
    checked = BenchRecord.model_validate(record)
    show(checked)
    for sentence in sentences(checked):
        _print(sentence)
    if out is not None:
        _print(f"report: {write_bench(record, out, force)}")
    covered = {"interval_coverage": checked.interval_coverage}
    _print(json.dumps({**names, **covered, "results": headline(checked)}, ensure_ascii=False))


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    out: Annotated[Path | None, typer.Option(help="Folder for report.html and record.json.")] = None,
    dtypes: Annotated[str, typer.Option(help="Dtypes to check, with commas between.")] = "float32,bfloat16",
    device: Device = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Prove that a causal language model is right: its files, and every way to run it."""
    from crosslayer.report.record import check_target
    from crosslayer.runtime.verify import FAIL, NOT_APPLICABLE, PASS, check_count, verify_source, write_record

    if out is not None:
        check_target(out, force)
    names, started = [name.strip() for name in dtypes.split(",")], time.monotonic()
    say(f"checking and loading {model}")
    with Progress("verifying", check_count(names)) as bar:
        rows = verify_source(model, dtypes=names, device=device, progress=bar.step)
    seconds = round(time.monotonic() - started, 1)
    _print_checks(rows)
    about = {"model": _public_name(model), "command": _command(), "seconds": seconds}
    if out is not None:
        _print(f"report: {write_record(rows, about, out, force)}")
    kinds = {"passed": PASS, "failed": FAIL, "not_applicable": NOT_APPLICABLE}
    counts = {key: sum(row.status == kind for row in rows) for key, kind in kinds.items()}
    _print(json.dumps({"model": about["model"], **counts, "seconds": seconds}, ensure_ascii=False))
    if counts["failed"]:
        raise typer.Exit(1)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Put the prompt into the chat template.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    debug: Debug = False,
) -> None:
    """Continue a prompt, token by token."""
    from crosslayer import load_model
    from crosslayer.runtime.generate import Sampling
    from crosslayer.runtime.generate import generate as run

    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text to continue")
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    sampling = Sampling(max_new_tokens, temperature, seed)
    found = run(loaded, tokenizer, prompt, sampling=sampling, chat=chat)
    _print(json.dumps({"model": _public_name(model), **found}, ensure_ascii=False))


@app.command()
def methods(
    layers: Annotated[int, typer.Option(min=2, help="Number of layers for the cache's share.")] = 32,
    debug: Debug = False,
) -> None:
    """List the cross-layer methods: what flows between layers and what the KV cache keeps."""
    from rich.console import Console
    from rich.table import Table

    from crosslayer.decoder.show import method_table

    rows = method_table(layers)
    table = Table(*(f"KV cache, {layers} layers" if key == "cache" else key for key in rows[0]), show_lines=True)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    _print(json.dumps({row["method"]: row["cache"] for row in rows}))


def _print_checks(rows: list) -> None:
    """Print the rows of a verification."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from crosslayer.report.verification import UNITS

    colours, table = {"PASS": "green", "FAIL": "red"}, Table(box=SIMPLE, pad_edge=False, caption=UNITS)
    for column in ("check", "dtype", "result", "difference", "tolerance"):
        table.add_column(column, no_wrap=True)
    table.add_column("")
    for row in rows:
        figures = ["" if x is None else f"{x:.2g}" for x in (row.difference, row.tolerance)]
        result = f"[{colours.get(row.status, 'yellow')}]{row.status}[/]"
        table.add_row(row.name, row.dtype or "", result, *figures, escape(row.reason))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _print(text: str) -> None:
    print(text, flush=True)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return whole numbers of at least 1 with commas between them, in their order and without repetitions."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise ValueError(f"{option} is {text!r}; it takes whole numbers of at least 1 with commas between, as 512,2048")
    return tuple(dict.fromkeys(int(word) for word in words))


def _public_name(model: str) -> str:
    """Return a model's name without the folders above it."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model


def _command() -> str:
    """Return the command as typed, with absolute paths cut to their last part."""
    words = [re.sub(r"(^|=)[/~].*/", r"\1", word) for word in sys.argv[1:]]
    return shlex.join(["crosslayer", *words])


def main() -> None:
    """Run the command line; bad input ends with one line and exit status 2, an interrupt with 130."""
    debug = "--debug" in sys.argv
    try:
        status = app(standalone_mode=False)
    except typer.Exit as stop:
        status = stop.exit_code
    except typer.BadParameter as error:  # its message alone does not name the parameter
        status = _fail(error.format_message())
    except typer.TyperException as error:
        status = _fail(str(error)) if str(error) else 2  # without words: the help was shown
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if debug:
            traceback.print_exc()
        status = _fail(" ".join(str(error).split()) or type(error).__name__)
    if status == INTERRUPTED:
        say("crosslayer: interrupted, nothing was written")
    sys.exit(status or 0)


def _fail(message: str) -> int:
    say(f"crosslayer: error: {message}")
    return 2

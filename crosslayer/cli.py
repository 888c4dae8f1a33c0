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

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention across depth: what one Transformer layer takes from another.",
)
INTERRUPTED = 130
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on an error.")]


@app.callback()
def _root(debug: Debug = False) -> None:
    """Hold the options of all verbs."""


@app.command()
def diagnose(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 or minilm (embedded).")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, record.json and the figures.")] = Path("diagnosis"),
    text: Annotated[str | None, typer.Option(help=".txt, .jsonl or .parquet, or a datasets name.")] = None,
    config: Annotated[str | None, typer.Option(help="Configuration of a dataset.")] = None,
    split: Annotated[str, typer.Option(help="Split of a dataset.")] = "train",
    column: Annotated[str, typer.Option(help="Text column of a table or dataset.")] = "text",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to measure; intervals need two.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the choice of text.")] = 0,
    bos: Annotated[str, typer.Option(help="First token: auto (as the tokenizer has it), yes or no.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; default the GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, …; default float32 on a CPU.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder of results.")] = False,
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
    _say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    documents = texts.load_documents(source, seed)
    ids = texts.pack(documents, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos)
    settings = {
        "model": _public_name(model),
        "text": source.describe(),
        "seed": seed,
        "bos": bos,
        "command": _command(),
    }
    with _Progress("diagnosing", sequences) as bar:
        found = run(loaded, ids, tokenizer, settings=settings, progress=bar.step)
    record = found.record()
    page, headline = write_diagnosis(record, out, force)
    for word in record["verdict"]["words"]:
        _print(word)
    _print(f"report: {page}")
    _print(json.dumps(headline, ensure_ascii=False))


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


class _Progress:
    """Progress on stderr: a bar with the time that is left on a terminal, plain lines otherwise."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.started, self.bar = what, total, time.monotonic(), None

    def __enter__(self) -> "_Progress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.what, total=self.total)
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
            return
        left = (time.monotonic() - self.started) / done * (total - done)
        _say(f"{self.what}: {done} of {total}, about {left:.0f} s left")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(text: str) -> None:
    print(text, flush=True)


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
        _say("crosslayer: interrupted, nothing was written")
    sys.exit(status or 0)


def _fail(message: str) -> int:
    _say(f"crosslayer: error: {message}")
    return 2

"""What verbs share: options, and how they print."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crosslayer._start import interrupts
from crosslayer.output.progress import print_to, say

if TYPE_CHECKING:
    from rich.table import Table

LARGEST_SEED = 2**63 - 1  # torch takes no larger seed

Text = Annotated[str | None, typer.Option(help=".txt, .md, .jsonl or .parquet (or a folder), or a datasets name.")]
Config = Annotated[str | None, typer.Option(help="Configuration of a dataset.")]
Split = Annotated[str, typer.Option(help="Split of a dataset.")]
Column = Annotated[str, typer.Option(help="Text column of a table or dataset.")]
Bos = Annotated[str, typer.Option(help="First token: auto (as the tokenizer has it), yes or no.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …; default the GPU, or the CPU where there is none.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, …; default float32 on a CPU.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences to measure; intervals need two.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens a sequence.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of all that is drawn at random.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing folder of results.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on an error.")]


def _allow(names: list[str] | None) -> list[str] | None:
    """Allow modules before anything is loaded."""
    if names:
        with importing():
            from crosslayer.methods import allow_methods
        allow_methods(*names)
    return names


AllowMethods = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-methods", metavar="MODULE", callback=_allow, help="A module of your own that a config may name."
    ),
]


@contextmanager
def importing() -> Iterator[None]:
    """Import what a verb needs: it is said, since it takes seconds; until its end Ctrl-C just ends the process."""
    if "torch" not in sys.modules:
        say("importing torch and transformers")
    yield
    interrupts.at_once = False


def whole_numbers(option: str, text: str, least: int = 1, example: str = "512,2048") -> tuple[int, ...]:
    """Return whole numbers with commas between them, in their order and without repetitions.

    Raises:
        ValueError: something else is there, or a number below `least`.

    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ValueError(
            f"{option} is {text!r}; it takes whole numbers of at least {least} with commas between, as {example}"
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def print_line(text: str) -> None:
    """Print a line of the result on stdout, at once."""
    print_to(sys.stdout, text)


def print_table(table: "Table", width: int | None = None) -> None:
    """Print a table of rich on stdout; `width` in characters, by default that of the terminal."""
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    print_line(capture.get().rstrip("\n"))


def print_headline(figures: dict[str, Any]) -> None:
    """Print the last line of the result, a JSON object, in characters that stdout can show."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print_line(json.dumps(figures, ensure_ascii=not unicode))


def command_line() -> str:
    """Return the command as typed, with absolute paths cut to their last part."""
    words = [re.sub(r"(^|=)[/~].*/", r"\1", word) for word in sys.argv[1:]]
    return shlex.join(["crosslayer", *words])

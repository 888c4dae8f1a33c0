"""The command line: a file for each verb, which parses, calls and prints.

Nothing heavy is imported before a verb runs, so that help and errors of typing come at once.
"""

import sys
import traceback
from typing import Annotated

import typer

from crosslayer import __version__
from crosslayer.cli import bench, diagnose, generate, intervene, methods, retrofit, verify
from crosslayer.cli.options import Debug, print_line
from crosslayer.progress import say

INTERRUPTED = 130
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention across depth: what one Transformer layer takes from another.",
)
for verb in (diagnose, intervene, retrofit, bench, verify, generate, methods):
    app.command(verb.__name__.rpartition(".")[2])(verb.command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"crosslayer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Hold the options of all verbs."""


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

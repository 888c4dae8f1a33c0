"""The command line, built from the verbs: each parameter of a verb's Python function is an option.

Nothing heavy is imported before a verb runs, so that help and usage errors appear at once.
"""

import codecs
import io
import sys
import traceback
import warnings
from typing import Annotated

import typer

from crosslayer._start import INTERRUPT_LINE, INTERRUPTED, interrupts
from crosslayer.cli import errors
from crosslayer.cli.command import command_of, print_line
from crosslayer.cli.declared import EVERYWHERE, read_verb
from crosslayer.output.folder import release_targets
from crosslayer.output.progress import say
from crosslayer.verbs import GROUPS, verb_names

START = """Attention across depth: what a Transformer layer can take from the layers below it. Start with

  crosslayer methods                               what layers can take from each other, for models that you train
  crosslayer diagnose smollm2                      attention sinks and redundant layers of a pretrained model (a minute)
  crosslayer measure smollm2 --candidate int4      bytes, KL, retrieval and time of a smaller cache (minutes)

smollm2 stands for any model: an embedded one, a folder, or a name on the Hugging Face hub.
crosslayer --help lists all commands, crosslayer COMMAND --help the options of one."""
app = typer.Typer(
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Attention across depth: what a Transformer layer can take from the layers below it. Train it and compare "
    "methods, find it in pretrained models, convert models to smaller KV caches, measure the cost, and serve them.",
)
VERBS = sorted(map(read_verb, verb_names()), key=lambda verb: GROUPS.index(verb.group))
for verb in VERBS:
    app.command(verb.command, rich_help_panel=verb.group)(command_of(verb))


def _show_version(wanted: bool) -> None:
    if wanted:
        from crosslayer import __version__

        print_line(f"crosslayer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, metavar=" ", help="print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar=" ", help=EVERYWHERE[-1].text)] = False,
) -> None:
    """Define the options of the program itself; without a command, print what to type."""
    if context.invoked_subcommand is None:
        print_line(START)


# what a reader takes for the character that a terminal lacks
SIMILAR = {
    "←": "<",
    "→": ">",
    "−": "-",
    "≤": "<=",
    "≥": ">=",
    "…": "...",
    "×": "x",
    "÷": "/",
    "·": "-",
    "–": "-",
    "‖": "|",
}


def similar(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for characters that a terminal lacks, where a reader knows it at once; else escapes."""
    assert isinstance(error, UnicodeEncodeError)
    text = ""
    for character in error.object[error.start : error.end]:
        text += SIMILAR.get(character, character.encode("ascii", "backslashreplace").decode())
    return text, error.end


def main() -> None:
    """Run the command line.

    The exit status is 0 (success), 1 (a check failed, or training stopped early), 2 (an error that the user can fix),
    70 (an internal error) or 130 (interrupted). Every error is printed as a single line.
    """
    # for a terminal of a Windows code page, or of ASCII alone
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("crosslayer", similar)
        sys.stdout.reconfigure(errors="crosslayer")
    line = ""
    try:
        errors.check_arguments(sys.argv[1:])
        with warnings.catch_warnings():
            # in one line, without the source line that raised it
            warnings.showwarning = lambda text, *_, **__: say(f"crosslayer: warning: {' '.join(str(text).split())}")
            status = app(standalone_mode=False)
    except typer.Exit as stop:
        status = stop.exit_code
    except SystemExit as stop:
        # 1: the reader of typer's or rich's output has closed the pipe, which is no error
        status = 0 if stop.code == 1 else stop.code
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except typer.TyperException as error:
        # without a message, the help was shown
        flags = {verb.command: [flag for option in verb.options for flag in option.flag.split("/")] for verb in VERBS}
        status, line = errors.USER_ERROR, errors.usage_line(error.format_message(), flags, sys.argv[1:])
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        # a library may have turned Ctrl-C into an error of its own
        status = interrupts.behind(error)
        if not status:
            options = {option.name for verb in VERBS for option in verb.options}
            status, line = errors.explain(error, options)
    finally:
        # first: another Ctrl-C must not leave the locks behind
        interrupts.caught()
        release_targets()
    if line:
        say(f"crosslayer: error: {line}")
    if status == INTERRUPTED:
        say(INTERRUPT_LINE + interrupts.advice)
    sys.exit(status or 0)

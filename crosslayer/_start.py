"""How this process was started: the command line loads nothing heavy, and nothing out of the working directory."""

import sys
from pathlib import Path

NAME = "crosslayer"


def is_command() -> bool:
    """Return whether this process is `crosslayer …` or `python -m crosslayer …`.

    While Python looks for the module of `-m`, which imports this package, `sys.argv[0]` is "-m".
    """
    if sys.argv[:1] == ["-m"]:
        return NAME in sys.orig_argv and sys.orig_argv[sys.orig_argv.index(NAME) - 1] == "-m"
    return bool(sys.argv) and Path(sys.argv[0]).stem == NAME


def leave_working_directory() -> None:
    """Take the working directory, which `-m` puts first, off the import path: a downloaded folder may hold modules."""
    if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
        sys.path.pop(0)

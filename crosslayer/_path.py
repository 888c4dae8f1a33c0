"""The working directory leaves the import path as soon as a command starts: a downloaded folder may hold modules.

Imported before anything else, and itself imports nothing that could lie in such a folder.
"""

import sys

NAME = "crosslayer"


def _is_command() -> bool:
    """Return whether this process is `crosslayer …` or `python -m crosslayer …`.

    While Python looks for the module of `-m`, which imports this package, `sys.argv[0]` is "-m".
    """
    if sys.argv[:1] == ["-m"]:
        return NAME in sys.orig_argv and sys.orig_argv[sys.orig_argv.index(NAME) - 1] == "-m"
    last = sys.argv[0].replace("\\", "/").rpartition("/")[2] if sys.argv else ""
    return last.removesuffix(".exe") == NAME


IS_COMMAND = _is_command()
if IS_COMMAND and sys.argv[0] == "-m" and not sys.flags.safe_path:
    sys.path.pop(0)

"""The working directory leaves the import path as soon as a command starts: a downloaded folder may hold modules.

Imported before anything else, and itself imports nothing that such a folder could shadow.
"""

import sys

NAME = "crosslayer"
# of Python itself, which may stand before the m in one word: a check for "-m" alone missed `-um`
FLAGS = frozenset("bBdEhiIOPqsStuvVx")


def _is_command() -> bool:
    """Return whether this process is `crosslayer …` or `python -m crosslayer …`.

    While Python searches the module of `-m`, which imports this package, `sys.argv[0]` is "-m".
    """
    if sys.argv[:1] != ["-m"]:
        last = sys.argv[0].replace("\\", "/").rpartition("/")[2] if sys.argv else ""
        return last.removesuffix(".exe") == NAME
    # however it was written: -m NAME, -um NAME, -mNAME
    for index, word in enumerate(sys.orig_argv):
        before, m, behind = word[1:].partition("m")
        if word[:1] == "-" and m and FLAGS.issuperset(before):
            return (behind or "".join(sys.orig_argv[index + 1 : index + 2])) == NAME
    return False


IS_COMMAND = _is_command()
# `python -m` puts the working directory first; an installed command has the folder of its script there
if IS_COMMAND and sys.argv[0] == "-m" and not sys.flags.safe_path:
    sys.path.pop(0)

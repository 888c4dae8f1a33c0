"""How a verb ends that could not do its work: a single line, and an exit status that says whose turn it is."""

import os
import re
import sys
from collections.abc import Collection, Sequence

from crosslayer._start import EndedTooSoon

ENDED, MEND, FAULT = 1, 2, 70  # 0 stands for done, 1 also for checks that failed, 130 for an interrupt
# how errors of the library name an option of a call
OPTION = re.compile(r"`([a-z_]+)`|^([a-z_]+)(?:(?:\.\d+)?(?=: Input)|(?= is | must be ))")
MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # how torch words it in a RuntimeError


def explain(error: Exception, options: Collection[str] = ()) -> tuple[int, str]:
    """Return exit status and line of an error: `MEND` for what the user can mend, `FAULT` for the rest.

    Where the library names one of `options`, as in Python, the line names it as the command line does.
    """

    def as_typed(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return "--" + name.replace("_", "-") if name in options else match[0]

    text = OPTION.sub(as_typed, _one_line(_worded(error)))
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(word in text for word in MEMORY):
        return MEND, "memory ran out; use fewer or shorter sequences, a smaller batch or a smaller dtype"
    if isinstance(error, EndedTooSoon):
        return ENDED, text
    kind, package = type(error).__name__, type(error).__module__.partition(".")[0]
    is_schema_error = package in ("pydantic", "pydantic_core")  # a record of ours does not follow its schema: our fault
    if isinstance(error, ValueError | OSError) and not is_schema_error:
        return MEND, text or kind
    if kind == "SafetensorError":  # what a disk that is full is called while weights are written
        return MEND, f"weights could not be read or written: {text}"
    return FAULT, f"internal error: {kind}: {text[:200]} (--debug shows where; please report it)"


def _worded(error: Exception) -> str:
    """Return what an error says, one of the operating system without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{str(error.filename)!r}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def check_words(words: Sequence[str]) -> None:
    """Refuse arguments whose bytes are no text: they could be neither printed nor written into a record."""
    for number, word in enumerate(words, 1):
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise ValueError(
                f"argument {number} is {os.fsencode(word)!r}, which is no text in {sys.getfilesystemencoding()}"
            )


def _one_line(text: str) -> str:
    """Return text in a single line, without control characters, which could rule the terminal."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)

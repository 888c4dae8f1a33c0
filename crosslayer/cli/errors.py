"""Errors of the command line: a single line, and an exit status that says whether the user can fix the error."""

import difflib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence

from crosslayer._start import EndedTooSoon
from crosslayer.cli.declared import SPELLED
from crosslayer.output.formatting import listed

STOPPED, USER_ERROR, INTERNAL_ERROR = 1, 2, 70  # also: 0 for success, 1 for failed checks, 130 for an interrupt
# how error messages of the library name an option
OPTION = re.compile(r"`([a-z_]+)`|(?:^|(?<=; ))([a-z_]+)(?:(?:\.\d+)?(?= must |: Input)|(?= is ))")
# typer's words
INVALID = re.compile(r"Invalid value for '(\S+)': Input should be (a valid \w+)")
UNKNOWN_OPTION = re.compile(r"No such option: (\S+)(?: \(Possible options: (.*)\))?")
# vLLM asks for these packages, and pip takes builds for CUDA, which do not load with a torch for CPUs
BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")
# torch raises a RuntimeError where memory is short
MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def explain(error: Exception, options: Collection[str] = ()) -> tuple[int, str]:
    """Return exit status and line of an error: `USER_ERROR` if the user can fix it, else `INTERNAL_ERROR`.

    A message that names one of `options` as in Python (`new_tokens`) gets the name on the command line (--new-tokens).
    """

    def as_typed(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return SPELLED.get(name, "--" + name.replace("_", "-")) if name in options else match[0]

    message = str(error)
    # without the number of the error
    if isinstance(error, OSError) and error.strerror:
        message = f"{str(error.filename)!r}: {error.strerror}" if error.filename is not None else error.strerror
    text = OPTION.sub(as_typed, _one_line(message))
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(phrase in text for phrase in MEMORY):
        return USER_ERROR, "out of memory; use fewer or shorter sequences, a smaller batch or a smaller dtype"
    if isinstance(error, EndedTooSoon):
        return STOPPED, text

    # transformers says only that it cannot import a class; the reason stands in an error behind
    cause: BaseException | None = error if isinstance(error, ImportError) else None
    while cause is not None:
        for package in BUILT_FOR_TORCH:
            if package in str(cause):
                names = " ".join(BUILT_FOR_TORCH)
                return USER_ERROR, f"{package} was built for another torch than the one here; try pip uninstall {names}"
        cause = cause.__cause__ or cause.__context__

    # a pydantic error is a ValueError too: one of our own records does not match its schema
    name = type(error).__name__
    is_schema_error = type(error).__module__.partition(".")[0] in ("pydantic", "pydantic_core")
    if isinstance(error, ValueError | OSError) and not is_schema_error:
        return USER_ERROR, text or name
    # raised when the disk is full while weights are written
    if name == "SafetensorError":
        return USER_ERROR, f"weights could not be read or written: {text}"
    return INTERNAL_ERROR, f"internal error: {name}: {text[:200]} (report it with the traceback, which --debug shows)"


def usage_line(message: str, flags: Mapping[str, Collection[str]], typed: Sequence[str] = ()) -> str:
    """Return the line of a usage error, with what helps; `flags` are the options of each verb."""
    line = _one_line(message)
    if line.startswith("Missing "):
        verb = next((word for word in typed if word in flags), "")
        return f"{line.removesuffix('.')}; see crosslayer {verb} --help"
    if invalid := INVALID.match(line):
        given = re.search(rf"{invalid[1]}[= ](\S+)", _one_line(" ".join(typed)))
        return f"{invalid[1]} must be {invalid[2]}, got {given[1] if given else 'none'}"
    match = UNKNOWN_OPTION.fullmatch(line)
    if match is None:
        return line
    name, near = match.groups()
    # an option of another command is more likely meant than one of a similar name
    if verbs := [verb for verb, names in flags.items() if name in names]:
        return f"No such option: {name}; it is an option of {listed(verbs)}"
    if "serve" in typed:
        return f"No such option: {name}; options of vLLM itself go after --: crosslayer serve MODEL -- {name} …"
    if near is None:
        return line
    # typer's are in the order of the alphabet
    nearest = difflib.get_close_matches(name, near.split(", "), 3, 0)
    return f"No such option: {name}; did you mean {' or '.join(nearest)}?"


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments whose bytes are not text: they could be neither printed nor written into a record."""
    for position, argument in enumerate(arguments, 1):
        # Python decodes such bytes as lone surrogates
        if any("\ud800" <= character <= "\udfff" for character in argument):
            encoding = sys.getfilesystemencoding()
            raise ValueError(f"argument {position} must be valid {encoding}, got {os.fsencode(argument)!r}")


def _one_line(text: str) -> str:
    """Return text in a single line, with control characters escaped, since they could control the terminal."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)

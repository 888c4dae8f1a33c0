"""Progress of a long computation, for people: a bar on a terminal, plain lines elsewhere; always on stderr."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, Self, TextIO

QUIET = 5  # seconds between two lines
WHOLE = 10**6  # seconds of the past from which the time that is left is estimated: all of it


def say(text: str) -> None:
    """Print a line on stderr."""
    print_to(sys.stderr, text)


def print_to(stream: TextIO, text: str) -> None:
    """Print a line at once; where its reader has gone (`| head`), go on without printing: the work is wanted.

    Raises:
        ValueError: stdout is on a disk that is full, say. Messages that cannot be written are left out.

    """
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # what is left in the buffer goes there too, also when the process ends
        os.close(nowhere)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise ValueError(f"stdout cannot be written: {error.strerror}") from error


class Steps(Protocol):
    """What a running meter takes: how many steps are done, of how many, and what runs now."""

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Show how far the work is."""


Meter = Callable[[str, int], AbstractContextManager[Steps]]  # what is done, and in how many steps (0: unknown)


class Silent(AbstractContextManager):
    """The meter of Python calls: it shows nothing."""

    def __init__(self, what: str, total: int = 0):
        pass

    def __exit__(self, *_) -> None:
        pass

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Show nothing."""


class Progress:
    """The meter of the command line: on stderr, a bar with the time that is left on a terminal, plain lines otherwise.

    Work of 0 steps, whose length is not known, is a line, and more with how much is done where that is counted.
    """

    def __init__(self, what: str, total: int = 0):
        from rich import progress
        from rich.console import Console

        self.what, self.total, self.said, self.shown = what, total, time.monotonic(), (-1, "")
        self.is_bar = bool(total) and sys.stderr.isatty()
        columns = progress.SpinnerColumn(), "{task.description}", progress.BarColumn(), progress.MofNCompleteColumn()
        self.bar = progress.Progress(
            *columns,
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            speed_estimate_period=WHOLE,
            get_time=time.monotonic,
            disable=not self.is_bar,
        )
        number = self.bar.add_task(what, total=total or None)
        self.task = self.bar.tasks[number]

    def __enter__(self) -> Self:
        self.bar.start()
        if self.total:
            self.step(0, self.total)
        else:
            say(self.what)
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Show how much is done, what is being done where it has a name, and about how long the rest takes."""
        if (done, doing) == self.shown:  # a search may take more steps than it expected
            return
        self.shown = (done, doing)
        what = f"{self.what}: {doing}" if doing else self.what
        self.bar.update(self.task.id, description=what, completed=done, total=total or None)
        if not self.is_bar and (doing or done in (0, total) or time.monotonic() - self.said >= QUIET):
            self.said = time.monotonic()
            count = f"{done} of {total}" if total else f"{done:,} so far"
            say(f"{self.what}: {count}{self._time()}{f'; now {doing}' if doing else ''}")

    def _time(self) -> str:
        if self.task.finished:
            return f", {self.task.elapsed:.0f} s"
        left = self.task.time_remaining
        return "" if left is None else f", about {left:.0f} s left"

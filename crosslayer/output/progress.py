"""Progress of a long computation, for people: a bar on a terminal, plain lines elsewhere; always on stderr."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, Self, TextIO

QUIET = 5  # seconds between two lines
SMOOTHING = 0.3  # how far the time that is left follows what the last step says


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


class Silent:
    """The meter of Python calls: it shows nothing."""

    def __init__(self, what: str, total: int = 0):
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        pass

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Show nothing."""


class Remaining:
    """The time that is left, smoothed: single steps differ, and the first is slower than all others."""

    def __init__(self):
        self.first: tuple[int, float] | None = None  # steps done and the time when the first had ended
        self.left: float | None = None
        self.at = 0.0

    def after(self, done: int, total: int, now: float) -> float | None:
        """Return the seconds that are left after `done` of `total` steps; None while only the first is known."""
        if self.first is None or done <= self.first[0]:
            self.first, self.at = (done, now), now
            return None
        guess = (now - self.first[1]) / (done - self.first[0]) * (total - done)
        if self.left is None:
            self.left = guess
        else:
            expected = max(0.0, self.left - (now - self.at))
            self.left = expected + SMOOTHING * (guess - expected)
        self.at = now
        return self.left


class Progress:
    """The meter of the command line: on stderr, a bar with the time that is left on a terminal, plain lines otherwise.

    Work of 0 steps, whose length is not known, is a line, and more with how much is done where that is counted.
    """

    def __init__(self, what: str, total: int = 0):
        self.what, self.total, self.started, self.bar = what, total, time.monotonic(), None
        self.said, self.remaining, self.shown = self.started, Remaining(), (-1, "")

    def __enter__(self) -> Self:
        if not self.total:
            say(self.what)
            return self
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn
            from rich.progress import Progress as Bar

            columns = "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[time]}"
            self.bar = Bar(SpinnerColumn(), *columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.what, total=self.total, time="")
        self.step(0, self.total)
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Show how much is done, what is being done where it has a name, and about how long the rest takes."""
        if (done, doing) == self.shown:  # a search may take more steps than it expected
            return
        now, self.shown = time.monotonic(), (done, doing)
        left = self.remaining.after(done, total, now) if done and total else None
        words = "" if left is None else f", about {left:.0f} s left"
        if done == total:
            words = f", {now - self.started:.0f} s"
        if self.bar is not None:
            what = f"{self.what}: {doing}" if doing else self.what
            self.bar.update(self.task, description=what, completed=done, total=total, time=words.removeprefix(", "))
        elif doing or done in (0, total) or now - self.said >= QUIET:
            self.said = now
            count = f"{done} of {total}" if total else f"{done:,} so far"
            say(f"{self.what}: {count}{words}{f'; now {doing}' if doing else ''}")

"""Progress of a long computation on stderr: a bar on a terminal, plain lines otherwise."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Self, TextIO

from crosslayer._start import interrupts

QUIET = 5  # seconds between two lines
WHOLE = 10**6  # seconds over which speed is averaged to estimate the time left: all of them


def say(text: str) -> None:
    """Print a line on stderr."""
    print_to(sys.stderr, text)


def print_to(stream: TextIO, text: str) -> None:
    """Print a line and flush it; if nobody reads any more (`| head`), go on without printing.

    Raises:
        ValueError: stdout cannot be written, for example to a full disk; on stderr this is ignored.
    """
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        # Python flushes once more at its end, and what is left in the buffer would fail again
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise ValueError(f"stdout cannot be written: {error.strerror}") from error


class Steps:
    """A running progress meter, which shows nothing."""

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Show how many steps are done, of how many, and what is being done."""


# from the task and its number of steps (0: unknown)
ProgressFactory = Callable[[str, int], AbstractContextManager[Steps]]


def no_progress(what: str, total: int) -> AbstractContextManager[Steps]:
    """Return the meter of calls from Python, which shows nothing."""
    return nullcontext(Steps())


_METER: ContextVar[ProgressFactory] = ContextVar("meter", default=no_progress)


@contextmanager
def progress(what: str, total: int = 0) -> Iterator[Steps]:
    """Show a task of `total` steps (0: unknown) on the meter of `metered_by`; without one nothing is shown.

    Tasks within one whose steps are counted are not shown: its bar is.
    """
    with _METER.get()(what, total) as steps, metered_by(no_progress) if total else nullcontext():
        yield steps


@contextmanager
def metered_by(meter: ProgressFactory) -> Iterator[None]:
    """Show what runs in the block with a meter, such as `Progress`."""
    token = _METER.set(meter)
    try:
        yield
    finally:
        _METER.reset(token)


def prefixed(task: str) -> AbstractContextManager[None]:
    """Show the task's name before what is done in the block."""
    meter = _METER.get()
    return metered_by(lambda what, total: meter(f"{task}: {what}", total))


class Progress(Steps):
    """The meter of the command line, on stderr: a bar with the time left on a terminal, plain lines otherwise.

    A task of unknown length (0 steps) is one line, then lines with the number of steps done if these are counted.
    """

    def __init__(self, what: str, total: int = 0):
        from rich import progress
        from rich.console import Console

        self.what = what
        self.total = total
        self.printed = time.monotonic()
        self.shown = (-1, "")
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
        # where no bar is drawn, it still keeps the times for the lines
        index = self.bar.add_task(what, total=total or None)
        self.task = self.bar.tasks[index]

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
        """Show how much is done, what is being done, and an estimate of the time left."""
        interrupts.raise_again()
        # a search may take more steps than it expected: it reports its last one again
        if (done, doing) == self.shown:
            return
        self.shown = (done, doing)
        what = f"{self.what}: {doing}" if doing else self.what
        self.bar.update(self.task.id, description=what, completed=done, total=total or None)
        if not self.is_bar and (doing or done in (0, total) or time.monotonic() - self.printed >= QUIET):
            self.printed = time.monotonic()
            count = f"{done} of {total}" if total else f"{done:,} so far"
            clock = ""
            if self.task.finished:
                clock = f", {self.task.elapsed:.0f} s"
            elif self.task.time_remaining is not None:
                clock = f", about {self.task.time_remaining:.0f} s left"
            say(f"{self.what}: {count}{clock}{f'; now {doing}' if doing else ''}")

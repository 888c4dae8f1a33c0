"""How a command starts: its streams are open, it heeds Ctrl-C, and other libraries draw nothing into logs."""

import os
import signal
import sys
from types import FrameType

from crosslayer._path import NAME

INTERRUPTED = 130
INTERRUPT_LINE = f"{NAME}: interrupted, nothing is half-written"
PATIENCE, TRIES = 3, 3  # seconds until an interrupt that a library swallowed is raised again, and how often
# progress bars of other libraries, which fill a log with carriage returns
BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
command_line: str | None = None  # as it was typed, once a verb runs from a shell


class EndedTooSoon(RuntimeError):
    """Work that began and could not be finished, through no fault of what was asked: exit status 1."""


def open_streams() -> None:
    """Put the null device in the place of streams that the process was started without (`2>&-`): Python has None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is the stream's own
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def hide_bars() -> None:
    """Switch progress bars of other libraries off, before they are imported, where stderr is no terminal."""
    if not sys.stderr.isatty():
        for name in BARS:
            os.environ.setdefault(name, "1")


class Interrupts:
    """Ctrl-C: ends the process at once while there is nothing to clean up, and is a `KeyboardInterrupt` otherwise.

    Libraries swallow that exception, or turn it into another: it is raised again every `PATIENCE` seconds until the
    command line has caught it, and after `TRIES` times the process just ends.
    """

    def __init__(self):
        self.at_once, self.raised = True, 0
        self.advice = ""  # what the line says beside INTERRUPT_LINE: how to go on

    def watch(self) -> None:
        """Answer Ctrl-C from now on, unless the process was started to ignore it (`nohup`, `&` in a script)."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._press)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.at_once:
            self._end()
        if not self.raised:  # more presses change nothing: cleaning up must not be interrupted
            self._raise(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.raised == TRIES:
            self._end()
        self.raised += 1
        if sys.platform != "win32":
            signal.signal(signal.SIGALRM, self._raise)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        raise KeyboardInterrupt

    def caught(self) -> None:
        """Raise no more: what is cleaned up must not be interrupted, and then the process ends."""
        if self.raised and sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self.raised:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _end(self) -> None:
        os.write(2, f"{INTERRUPT_LINE}\n".encode())
        os._exit(INTERRUPTED)


interrupts = Interrupts()

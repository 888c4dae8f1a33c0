"""How a command starts: its streams are open, it heeds signals, and other libraries draw nothing into logs."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from crosslayer._path import NAME

INTERRUPTED = 130
INTERRUPT_LINE = f"{NAME}: interrupted, nothing is half-written"
PATIENCE = 3  # seconds in which more presses of Ctrl-C do not disturb the cleaning up after the first
# progress bars of other libraries, which fill a log with carriage returns
BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
# once a verb runs from a shell: what was typed, and of that the model and the output folder, which reports repeat
command_line: str | None = None
typed: dict[str, str] | None = None


class EndedTooSoon(RuntimeError):
    """Work that began and could not be finished, through no fault of what was asked: exit status 1."""


def open_streams() -> None:
    """Replace streams that the process was started without by the null device (`2>&-`): Python has None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:
            # the lowest that is free, which is the stream's own: no file that is opened later can take its place
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def hide_bars() -> None:
    """Switch progress bars of other libraries off, before they are imported, unless stderr is a terminal."""
    if not sys.stderr.isatty():
        for name in BARS:
            os.environ.setdefault(name, "1")


def keep_memory() -> None:
    """Make glibc reuse freed blocks, such as logits; mapping them again takes a tenth of a forward pass on a CPU."""
    # Above 32 MiB glibc maps a new block for every allocation, and the logits of a window take 50 MB: page faults took
    # 176 of the 1,147 s of a retrofit, with these thresholds 5 s. The largest resident set grows by 3%.
    with suppress(OSError, AttributeError, TypeError):  # another C library, or Windows
        library = ctypes.CDLL(None)
        library.mallopt(-3, 1 << 28)  # M_MMAP_THRESHOLD: larger blocks are mapped
        library.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: what is kept at most


class Interrupts:
    """Ctrl-C and `kill`: both end the process at once while there is nothing to clean up.

    Later they are a `KeyboardInterrupt` and a `SystemExit`, which clean up on their way. Where a library swallowed one,
    another signal raises it again.
    """

    def __init__(self):
        # whether a signal ends the process, since there is nothing to clean up
        self.at_once = True
        # when one was raised last, and its exit status; 0: never
        self.raised = 0.0
        self.status = 0
        # whether what was raised has left the work that it ended
        self.is_over = False
        # what the line says beside INTERRUPT_LINE: how to go on
        self.advice = ""

    def watch(self) -> None:
        """Answer from now on, unless the process was started to ignore them (`nohup`, `&` in a script)."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._answer)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._answer)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        # `os._exit`: an exception, which an import may turn into another, would show its traceback
        if self.at_once:
            if number == signal.SIGINT:
                os.write(2, f"{INTERRUPT_LINE}\n".encode())
            os._exit(128 + number)
        if self.raised and time.monotonic() - self.raised < PATIENCE:
            return
        self.raised, self.status = time.monotonic(), 128 + number
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def raise_again(self) -> None:
        """Raise a signal's exception again, if a library swallowed it: work that was interrupted still takes steps."""
        if self.raised and not self.is_over and time.monotonic() - self.raised >= PATIENCE:
            self.raised = time.monotonic()
            raise KeyboardInterrupt if self.status == 128 + signal.SIGINT else SystemExit(self.status)

    def behind(self, error: BaseException | None) -> int:
        """Return the exit status of a signal that a library turned into an error, 0 where none is behind it."""
        # shortly after a signal, whatever fails fails because of it
        if self.raised and time.monotonic() - self.raised < PATIENCE:
            return self.status
        # later only where its exception is among the contexts: a swallowed signal has nothing to do with this error
        while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            error = error.__context__
        return 0 if error is None else self.status

    def caught(self) -> None:
        """Heed Ctrl-C no more, if there was one: the command ends."""
        self.is_over = True
        if self.raised:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


interrupts = Interrupts()

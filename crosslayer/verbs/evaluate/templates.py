"""Templates of task files, rendered in jinja's sandbox and for a bounded time, since they may come from anyone."""

import contextlib
import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any
from unittest.mock import patch

from jinja2.sandbox import ImmutableSandboxedEnvironment

PATIENCE = 10.0  # seconds that a template may take; those of lm-eval take less than a millisecond
SHOWN = 60  # characters of a template that an error shows


class _Late(BaseException):
    """The time is up; no `Exception`, since jinja swallows those while it compiles."""


@contextlib.contextmanager
def sandboxed() -> Iterator[None]:
    """Render lm-eval's templates in a sandbox inside the block; what they give stays the same."""
    from lm_eval import utils

    own = utils.env
    sandbox = ImmutableSandboxedEnvironment(
        undefined=own.undefined, keep_trailing_newline=own.keep_trailing_newline, loader=own.loader
    )
    sandbox.filters = own.filters
    with patch.object(utils, "apply_template", functools.partial(_render, sandbox)):
        yield


def _render(sandbox: ImmutableSandboxedEnvironment, template: str, doc: Mapping[str, Any]) -> str:
    """Render a template, as lm-eval's `apply_template`."""
    try:
        with _within(PATIENCE):
            return sandbox.from_string(template).render(**doc)
    except _Late:
        reason = f"takes longer than {PATIENCE:g} s"
    except Exception as error:  # a template can do whatever an expression can
        reason = f"cannot be rendered ({type(error).__name__}: {error})"
    raise ValueError(f"a template of a task {reason}: {str(template)[:SHOWN]}")


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise `_Late` in the block when its time is up; in the main thread also in the middle of a regular expression."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        with _watched(seconds):
            yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _Late

    before, rest = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *rest)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Raise `_Late` in the block, in whatever thread it runs, from a timer's: between two operations of Python."""
    thread, ended, over = threading.get_ident(), threading.Lock(), False

    def ring() -> None:
        with ended:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Late))

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with ended:
            over = True
        timer.cancel()

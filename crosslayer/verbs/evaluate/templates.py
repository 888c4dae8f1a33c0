"""Renders templates of task files in jinja's sandbox and with a time limit, since they may come from anyone."""

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

TIME_LIMIT = 10.0  # seconds for a template; lm-eval's own take less than a millisecond
SHOWN = 60  # characters of a template that an error shows


class _Timeout(BaseException):
    """The time is up; not an `Exception`, since jinja swallows those while it compiles."""


@contextlib.contextmanager
def sandboxed() -> Iterator[None]:
    """Render lm-eval's templates in a sandbox inside the block, with the same output."""
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
        with _within(TIME_LIMIT):
            return sandbox.from_string(template).render(**doc)
    except _Timeout:
        reason = f"takes longer than {TIME_LIMIT:g} s"
    except Exception as error:  # an expression in a template may raise anything
        reason = f"cannot be rendered ({type(error).__name__}: {error})"
    raise ValueError(f"a template of a task {reason}: {str(template)[:SHOWN]}")


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise `_Timeout` in the block when time is up; in the main thread even in the middle of a regular expression."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        with _watched(seconds):
            yield
        return

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise _Timeout

    before, rest = signal.signal(signal.SIGALRM, on_alarm), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *rest)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Raise `_Timeout` in the thread of the block, from a timer thread, between two operations of Python."""
    thread, ended, over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with ended:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Timeout))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with ended:
            over = True
        timer.cancel()

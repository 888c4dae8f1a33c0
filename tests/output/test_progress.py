"""Few lines for a log, a bar for a terminal, both with the time that is left."""

import io
import sys

import pytest

from crosslayer.output import progress
from crosslayer.output.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_few_and_the_last_says_how_long_it_took(clock, capsys):
    with Progress("working", 4) as bar:
        for done in range(1, 5):
            clock[0] += 4
            bar.step(done, 4)
        bar.step(4, 4)
    assert capsys.readouterr().err.splitlines() == [
        "working: 0 of 4",
        "working: 2 of 4, about 8 s left",
        "working: 4 of 4, 16 s",
    ]


def test_steps_may_be_named_and_counted_in_leaps(clock, capsys):
    with Progress("search", 31) as bar:
        bar.step(27, 31, "layer 3")
        clock[0] += 4
        bar.step(31, 31)
        bar.step(32, 40)  # more than it expected
        bar.step(32, 40)
        clock[0] += 4
        bar.step(34, 40, "layer 4")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["search: 0 of 31", "search: 27 of 31; now layer 3", "search: 31 of 31, 4 s"]
    assert lines[3:] == ["search: 34 of 40, about 12 s left; now layer 4"]


def test_a_terminal_gets_a_bar_with_the_same_words(clock, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("working", 4) as bar:
        for done in range(1, 4):
            clock[0] += 4
            bar.step(done, 4)
    assert "3/4" in terminal.getvalue() and "0:00:04" in terminal.getvalue()


def test_work_whose_length_is_not_known_is_counted(clock, capsys):
    with Progress("reading") as bar:
        for done in range(1, 4):
            clock[0] += 4
            bar.step(1000 * done, 0)
    assert capsys.readouterr().err.splitlines() == ["reading", "reading: 2,000 so far"]
